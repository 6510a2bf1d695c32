"""The draft length of who asks for none: a number, or a target's own where measurements have shown a better one."""

__all__ = ["DEFAULT_LENGTH", "DefaultLength"]


class DefaultLength(int):
    """A draft length that nobody asked for: a load may take another, as its target's kind has it."""


DEFAULT_LENGTH = DefaultLength(3)
