"""The graph executor: every bucket's launches captured into a CUDA graph at the start, replayed for each step."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from lowlat.errors import DeviceError
from lowlat.executors.kernel_executor import KernelExecutor
from lowlat.graphs import Bucket
from lowlat.graphs.capture import CapturedGraph, capture
from lowlat.kernels.kernel import KernelCall
from lowlat.program import Program

__all__ = ["CaptureProgress", "GraphExecutor"]

CaptureProgress = Callable[[Bucket, int, int], None]


class GraphExecutor(KernelExecutor):
    """Captures every bucket, the largest first; after that nothing is allocated, compiled or synchronised.

    progress  called with the bucket just captured, buckets done and buckets in all
    Raises DeviceError for a capture that holds anything but the step's kernels, or an address that nobody owns.
    """

    name = "graph"

    def __init__(
        self,
        programs: Mapping[Bucket, Program],
        prefill: Program,
        weights: Mapping[str, torch.Tensor],
        device: torch.device,
        *,
        cache_directory: Path | None = None,
        progress: CaptureProgress | None = None,
    ) -> None:
        super().__init__(programs, prefill, weights, device, cache_directory=cache_directory)
        self._graphs: dict[Bucket, CapturedGraph] = {}
        with torch.cuda.stream(self.stream):
            self._core_stream = self.launcher.stream()
            for number, bucket in enumerate(programs):
                self._graphs[bucket] = self._capture(bucket)
                if progress is not None:
                    progress(bucket, number + 1, len(programs))
        self.synchronize()

    def _capture(self, bucket: Bucket) -> CapturedGraph:
        owned = _Addresses(self.owned())
        for group in self.groups(bucket):
            for call in group.calls:
                owned.check(call)
        launches = [launch for _, launches in self.prepare(bucket) for launch in launches]
        return capture(self._core_stream, launches)

    def step(self, bucket: Bucket) -> None:
        """Replay a bucket's graph; its publication comes later, see `wait_published`."""
        self._graphs[bucket].launch(self._core_stream)

    def graph(self, bucket: Bucket) -> CapturedGraph:
        """A bucket's graph."""
        return self._graphs[bucket]

    def num_kernels(self, bucket: Bucket) -> int:
        """Kernel nodes of a bucket's graph."""
        return self._graphs[bucket].num_kernels

    def close(self) -> None:
        """Release the graphs, then buffers and weights."""
        self.synchronize()
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        super().close()


class _Addresses:
    """The memory that a captured graph may point into."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        spans = ((tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()) for tensor in tensors)
        self._spans = sorted(span for span in spans if span[0] != span[1])

    def check(self, call: KernelCall) -> None:
        """Raise DeviceError for a call that points elsewhere."""
        for number, argument in enumerate(call.arguments):
            if isinstance(argument, torch.Tensor) and argument.numel():
                start = argument.data_ptr()
                end = start + argument.numel() * argument.element_size()
                if not any(low <= start and end <= high for low, high in self._spans):
                    raise DeviceError(f"kernel {call.kernel.name}: argument {number} lies in memory that nobody owns")
