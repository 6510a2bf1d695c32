"""This package implements OpenAI's API: it reads its requests, and answers in its shapes."""

__all__: list[str] = []
