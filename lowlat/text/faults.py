"""This module turns the tokenizer library's own failures into errors of the request whose text it failed on.

The library is written in Rust, and a part of a model's tokenizer.json, such as an expression that matches nothing but a
place, can make it panic on some texts. A panic is no `Exception`: what it passes through unnoticed is a thread's end.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from lowlat.errors import LowlatError, RequestError, is_panic

__all__ = ["library_failures"]


@contextmanager
def library_failures(doing: str) -> Iterator[None]:
    """Raise RequestError, "the model's tokenizer failed to ...", for whatever the library raises or panics with.

    The library's own text is left out, for it may hold the caller's.
    """
    try:
        yield
    except LowlatError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise RequestError(f"the model's tokenizer failed to {doing} ({type(error).__name__})") from error
