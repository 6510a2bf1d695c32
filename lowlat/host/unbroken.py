"""The mark of a runtime whose step, or other change, was broken off half done: it is of no use from then on."""

from types import TracebackType

from lowlat.errors import DeviceError

__all__ = ["Unbroken"]


class Unbroken:
    """A context in which a change is made whole: whatever exception leaves it is remembered, then `check` raises.

    A step that Ctrl-C ends may have committed tokens that its caller never gets, or have moved a part of the KV cache.
    """

    def __init__(self) -> None:
        self.failure = ""

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.failure = f"{kind.__name__} broke it off amid a change"

    def check(self) -> None:
        """Raise DeviceError where a change was broken off."""
        if self.failure:
            raise DeviceError(
                f"the runtime is of no more use: {self.failure}, so that tokens of its requests may be lost; load it "
                "again (Ctrl-C ends a runtime if it comes within a step)"
            )
