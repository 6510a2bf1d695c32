"""This package is OpenAI's interface: what its requests hold, and answers in its shapes."""

__all__: list[str] = []
