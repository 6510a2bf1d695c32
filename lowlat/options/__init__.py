"""This package declares the options of a runtime, of speculation and of a request. It loads no model."""
