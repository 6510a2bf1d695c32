"""A change guard refuses further use of a runtime after an exception has interrupted a change of its state."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from lowlat.errors import CapacityError, DeviceError, LowlatError, RequestError

__all__ = ["ChangeGuard"]


class ChangeGuard:
    """The context of one change. After an exception has left it, `check` raises.

    A step that Ctrl-C interrupts may have committed tokens that its caller never gets, or moved a part of the KV cache.
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
        """Enclose a wait within a change. Ctrl-C here is harmless: the next call waits again, and goes on."""
        try:
            yield
        except LowlatError:
            raise
        except BaseException as error:
            self._harmless = error
            raise

    @contextmanager
    def unless_refused(self) -> Iterator[None]:
        """Enclose a change that RequestError or CapacityError may refuse before it has changed anything."""
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
