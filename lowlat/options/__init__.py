"""This package declares every option of a runtime, of speculation and of a request, once. It knows no model."""
