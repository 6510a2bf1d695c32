"""Whether an earlier call was broken off amid a change, after which a runtime is of no more use."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from lowlat.errors import CapacityError, DeviceError, LowlatError, RequestError

__all__ = ["Unbroken"]


class Unbroken:
    """A context in which a change is made whole: an exception that leaves it is remembered, and `check` raises then.

    A step that Ctrl-C ends may have committed tokens that its caller never gets, or have moved a part of the KV cache.
    """

    def __init__(self) -> None:
        self.failure = ""
        self._harmless: BaseException | None = None

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and error is not self._harmless:
            self.failure = f"{kind.__name__} broke it off amid a change"
        self._harmless = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A part of a change that may be left as it is, and gone on with by the next: Ctrl-C there is harmless."""
        try:
            yield
        except LowlatError:
            raise
        except BaseException as error:
            self._harmless = error
            raise

    @contextmanager
    def unless_refused(self) -> Iterator[None]:
        """A change that is made whole, or refused before it begins."""
        refused: LowlatError | None = None
        with self:
            try:
                yield
            except (RequestError, CapacityError) as error:
                refused = error
        if refused is not None:
            raise refused

    def check(self) -> None:
        """Raise DeviceError where a change was broken off."""
        if self.failure:
            raise DeviceError(
                f"the runtime is of no more use: {self.failure}, so that tokens of its requests may be lost; load it "
                "again"
            )
