"""The eager executor: kernels launched one by one, an NVTX range a stage. For debugging and profiling."""

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import torch

from lowlat.executors import OpHook
from lowlat.executors.kernel_executor import KernelExecutor
from lowlat.executors.lowering.lowering import Group
from lowlat.graphs import Bucket
from lowlat.graphs.launch import Launch
from lowlat.program.program import Program

__all__ = ["EagerExecutor"]


class EagerExecutor(KernelExecutor):
    """Launches a bucket's kernels in order on its own stream; a bucket's kernels are compiled at its first step."""

    name = "eager"

    def __init__(
        self,
        programs: Mapping[Bucket, Program],
        prefills: Mapping[int, Program],
        weights: Mapping[str, torch.Tensor],
        device: torch.device,
        *,
        cache_directory: Path | None = None,
        watchdog: tuple[float, float] = (10.0, 2.0),
    ) -> None:
        super().__init__(programs, prefills, weights, device, cache_directory=cache_directory, watchdog=watchdog)
        self._prepared: dict[Bucket, list[tuple[Group, list[Launch]]]] = {}
        self._hook: OpHook | None = None

    def step(self, bucket: Bucket) -> None:
        """Launch one step; with a hook, wait after every group and call it for each of the group's operations."""
        prepared = self._prepared.get(bucket)
        if prepared is None:
            prepared = self._prepared[bucket] = self.prepare(bucket)
        with torch.cuda.stream(self.stream):
            stream = self.launcher.stream()
            for stage, run in groupby(prepared, key=lambda entry: entry[0].stage):
                with torch.cuda.nvtx.range(str(stage)):
                    for group, launches in run:
                        for launch in launches:
                            launch.issue(stream)
                        if self._hook is not None:
                            self.synchronize()
                            self._call_hook(self._hook, bucket, group)

    def _call_hook(self, hook: OpHook, bucket: Bucket, group: Group) -> None:
        buffers = {**self.state, **self._scratch[bucket]}
        for op in group.ops:
            names = {**op.reads, **op.writes}
            hook(op, {argument: buffers[name] for argument, name in names.items() if name not in group.hidden})

    def set_hook(self, hook: OpHook | None) -> None:
        """Call `hook(op, arguments)` for the operations of a group after it; what the group hides is left out."""
        self._hook = hook

    def close(self) -> None:
        """Drop every reference to programs, launches, buffers and weights."""
        self._prepared.clear()
        self._hook = None
        super().close()
