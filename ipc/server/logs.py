"""This module words what goes to the server's log: events with fields, and exceptions without their texts.

Which lines are written, how many a second and in what form is the business of the logger's handlers.
"""

import traceback

__all__ = ["describe"]

MAX_FRAMES = 12


def describe(error: BaseException) -> str:
    """An exception by type and places, without its text, which may hold a prompt."""
    frames = traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
    places = " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    return f"{type(error).__name__} at {places or 'no place'}"
