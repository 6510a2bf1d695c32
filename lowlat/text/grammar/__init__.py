"""Structured output: the grammar of a request, and what it allows next for each row of a step."""
