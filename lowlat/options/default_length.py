"""This module defines the default draft length, which a load may replace by one measured for its kind of target."""

__all__ = ["DEFAULT_LENGTH", "DefaultLength"]


class DefaultLength(int):
    """The draft length if no option gives one; a load may use another for its kind of target."""


DEFAULT_LENGTH = DefaultLength(3)
