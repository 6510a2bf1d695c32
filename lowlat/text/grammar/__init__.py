"""Structured output: what a request's grammar allows next, for each row of a step; it knows no model."""
