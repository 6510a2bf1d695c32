"""This is the draft length where no one asks for one: a number, or a target's own where one was measured."""

__all__ = ["DEFAULT_LENGTH", "DefaultLength"]


class DefaultLength(int):
    """A draft length that nobody asked for: a load may take another, as its target's kind has it."""


DEFAULT_LENGTH = DefaultLength(3)
