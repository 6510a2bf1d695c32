"""This package declares the options of a runtime, of speculation and of a request, each once. It loads no model."""
