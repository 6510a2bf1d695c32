"""Options of a runtime, of speculation and of a request, each declared once. Nothing here knows a model."""
