"""The eager executor issues launches one by one, with an NVTX range for each stage, for debugging and profiling."""

from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import groupby

import torch

from lowlat.executors import OpHook, chosen_body
from lowlat.executors.kernel_executor import KernelExecutor, Size
from lowlat.graphs import Bucket
from lowlat.graphs.launch import Launch
from lowlat.graphs.program import Stage
from lowlat.lowering.lower import LoweredGroup
from lowlat.step.variants import is_choice

__all__ = ["EagerExecutor"]


class EagerExecutor(KernelExecutor):
    """Issues a program's launches in order on its own stream; it loads them when the program first runs."""

    name = "eager"

    _hook: OpHook | None = None

    @cached_property
    def _prepared(self) -> dict[Size, list[tuple[LoweredGroup, list[Launch]]]]:
        """The launches of programs that have run."""
        return {}

    def step(self, bucket: Bucket, meanwhile: Callable[[], None] | None = None) -> None:
        """Issue one step; `meanwhile` is called right after its first stage, since a hook waits for each group.

        If the step chooses its draft length, the host waits for the choice and issues that body.
        """
        if is_choice(bucket):
            bucket = chosen_body(bucket, self.state, self._issue_and_wait)
        self._issue(bucket, meanwhile)

    def _run(self, size: Size) -> None:
        self._issue(size, None)

    def _issue_and_wait(self, size: Size) -> None:
        self._issue(size, None)
        self.synchronize()

    def _issue(self, size: Size, meanwhile: Callable[[], None] | None) -> None:
        prepared = self._prepared.get(size)
        if prepared is None:
            prepared = self._prepared[size] = self.prepare(size)
        hook = self._hook if isinstance(size, Bucket) else None
        program = self._programs[size]
        runs = [(stage, list(run)) for stage, run in groupby(prepared, key=lambda entry: entry[0].stage)]
        begun = max((place for place, (_, run) in enumerate(runs) if _lists_rows(run)), default=-1)
        with torch.cuda.stream(self.stream):
            stream = self.launcher.stream()
            if meanwhile is not None and begun < 0:  # what chose this step's width has told the rows
                meanwhile()
            for place, (stage, run) in enumerate(runs):
                with torch.cuda.nvtx.range(program.range_name(stage)):
                    for group, launches in run:
                        for launch in launches:
                            launch.issue(stream)
                        if hook is not None:
                            self.synchronize()
                            self._call_hook(hook, size, group)
                if meanwhile is not None and place == begun:
                    meanwhile()

    def _call_hook(self, hook: OpHook, size: Size, group: LoweredGroup) -> None:
        buffers = {**self.state, **self._scratch[size]}
        for op in group.ops:
            names = {**op.reads, **op.writes}
            hook(op, {argument: buffers[name] for argument, name in names.items() if name not in group.hidden})

    def set_hook(self, hook: OpHook | None) -> None:
        """Call `hook(op, arguments)` for each operation after its group, without the buffers that the group hides."""
        self._hook = hook

    def close(self) -> None:
        """Drop every reference to programs, launches, buffers and weights."""
        self._prepared.clear()
        self._hook = None
        super().close()


def _lists_rows(run: Iterable[tuple[LoweredGroup, list[Launch]]]) -> bool:
    """Whether these groups have operations of a step's beginning, alone or after others that they are fused with."""
    return any(op.stage is Stage.ACTIVE_SLOTS for group, _ in run for op in group.ops)
