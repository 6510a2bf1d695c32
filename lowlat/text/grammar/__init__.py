"""Structured output: the grammar of a request, and the tokens that it allows next for each row of a step."""
