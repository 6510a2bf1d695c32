"""The steps of a runtime: admission, prefill, launches, grammars' masks, and the outputs of what was published."""
