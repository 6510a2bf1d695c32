"""The interface of what learns from the steps that are launched, by what the device is to choose later ones."""

from typing import Any, Protocol

from lowlat.graphs import Bucket

__all__ = ["Learner"]


class Learner(Protocol):
    """Learns from steps of one runtime; it changes no token, and no step waits for it."""

    def launched(self, bucket: Bucket, *, loops: bool) -> None:
        """Know that a step of a bucket was launched, or steps of a loop."""

    def report(self) -> dict[str, Any]:
        """Return blocks of what was learnt, as JSON."""
