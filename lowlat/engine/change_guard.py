"""A change guard refuses a runtime after a change of its state that an exception interrupted."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from lowlat.errors import CapacityError, DeviceError, LowlatError, RequestError

__all__ = ["ChangeGuard"]


class ChangeGuard:
    """The context of one change. It remembers an exception that leaves it, and `check` raises from then on.

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
            self.failure = f"{kind.__name__} interrupted a change"
        self._harmless = None

    @contextmanager
    def repeatable_wait(self) -> Iterator[None]:
        """A wait within a change. Ctrl-C here is harmless: the next call waits again and goes on with the change."""
        try:
            yield
        except LowlatError:
            raise
        except BaseException as error:
            self._harmless = error
            raise

    @contextmanager
    def unless_refused(self) -> Iterator[None]:
        """A change that may be refused, by RequestError or CapacityError, before it has changed anything."""
        refused: LowlatError | None = None
        with self:
            try:
                yield
            except (RequestError, CapacityError) as error:
                refused = error
        if refused is not None:
            raise refused

    def check(self) -> None:
        """Raise DeviceError if a change was interrupted."""
        if self.failure:
            raise DeviceError(
                f"the runtime cannot be used any more: {self.failure}, so tokens of its requests may be lost; load it "
                "again"
            )
