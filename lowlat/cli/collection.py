"""This module lets Python's garbage collector run rarely while a command imports, plans or loads."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["rare_collections"]

YOUNG_OBJECTS = 50_000  # torch's modules alone are 200,000 objects, which each full collection walks


@contextmanager
def rare_collections() -> Iterator[None]:
    """Raise the threshold of garbage collections in the whole process while the context lasts; also a decorator.

    With Python's own thresholds, collections take a sixth of the CPU time of a command that imports torch and plans.
    """
    young, *older = gc.get_threshold()
    gc.set_threshold(max(young, YOUNG_OBJECTS) if young else 0, *older)  # 0: collections are off
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
