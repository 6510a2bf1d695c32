"""This module keeps captured graphs by bucket, or by another key, and replays them."""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lowlat.errors import DeviceError

__all__ = ["CapturedGraph", "Replays"]

Key = TypeVar("Key", bound=Hashable)


@dataclass
class CapturedGraph:
    """An instantiated graph. `num_kernels` counts its kernel nodes: a loop's body once, and every body of a choice."""

    graph: Any
    num_kernels: int

    def launch(self, stream: Any) -> None:
        """Replay on a cuda.core Stream, asynchronously. Raises DeviceError when the device has failed."""
        try:
            self.graph.launch(stream)
        except Exception as error:  # cuda.core's error has no public name
            raise DeviceError(f"a captured step cannot be launched: {error}") from error

    def close(self) -> None:
        """Release the graph."""
        self.graph.close()


class Replays(Mapping[Key, CapturedGraph], Generic[Key]):
    """Captured graphs by key, replayed on one stream in the order in which they are launched.

    stream  a cuda.core Stream
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._graphs: dict[Key, CapturedGraph] = {}

    def __setitem__(self, key: Key, graph: CapturedGraph) -> None:
        self._graphs[key] = graph

    def __getitem__(self, key: Key) -> CapturedGraph:
        return self._graphs[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._graphs)

    def __len__(self) -> int:
        return len(self._graphs)

    def launch(self, key: Key) -> None:
        """Replay the graph of a key, asynchronously. Raises DeviceError as `CapturedGraph.launch` does."""
        self._graphs[key].launch(self._stream)

    def close(self) -> None:
        """Release every graph; none may be running."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()

    def abandon(self) -> list[CapturedGraph]:
        """Give up every graph without releasing it: on a device that hangs, a release would wait for ever."""
        graphs = list(self._graphs.values())
        self._graphs.clear()
        return graphs
