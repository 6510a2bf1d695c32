"""This package has structured output: a request's grammar, and the tokens that it allows for each row of a step."""
