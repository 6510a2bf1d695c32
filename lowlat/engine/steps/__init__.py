"""This package runs the steps of a runtime: admission, prefill, launches, grammars' masks, and outputs."""
