"""This module describes exceptions for the server's log without their texts, which may contain prompts.

The logger's handlers decide which lines are written, how many a second and in what form.
"""

import traceback

__all__ = ["describe"]

MAX_FRAMES = 12


def describe(error: BaseException) -> str:
    """Describe an exception by its type and stack, without its text, which may contain a prompt."""
    frames = traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
    places = " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    return f"{type(error).__name__} at {places or 'no place'}"
