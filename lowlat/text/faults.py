"""This module turns failures of the tokenizer library into errors of the request whose text caused them.

The library is written in Rust. A part of a model's tokenizer.json, such as an expression with only empty matches, can
make it panic on some texts. A panic is no `Exception`: uncaught, it would end the thread.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from lowlat.errors import LowlatError, RequestError, is_panic

__all__ = ["library_failures"]


@contextmanager
def library_failures(doing: str) -> Iterator[None]:
    """Raise RequestError, "the model's tokenizer failed to ...", for whatever the library raises or panics with.

    The library's message is left out, since it may contain the caller's text.
    """
    try:
        yield
    except LowlatError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise RequestError(f"the model's tokenizer failed to {doing} ({type(error).__name__})") from error
