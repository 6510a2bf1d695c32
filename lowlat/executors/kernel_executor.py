"""What the eager and the graph executor share: buffers, weights, lowered programs, prefill, the wait for the ring.

Everything a step touches is allocated here, before the first step: state on the device, the host's commands and the
publications in pinned memory, one arena of scratch for all buckets and for prefill, workspaces. What torch takes while
a chunk of prefill runs is its own: a captured one has that from its capture on.
"""

import select
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from lowlat.errors import ConfigError, DeviceError
from lowlat.executors import OpHook
from lowlat.executors.allocation import (
    STATE_ROLES,
    SharedConstants,
    clear_blocks,
    first_rows,
    pinned_names,
    release_cached_memory,
)
from lowlat.executors.device_weights import DeviceWeights
from lowlat.executors.launcher import Launcher
from lowlat.executors.lowering.lowering import Group, Lowering, lower
from lowlat.executors.lowering.rules import RULES
from lowlat.executors.lowering.weight_layouts import expert_parts, weight_permutations
from lowlat.executors.prefill.arguments import ChunkArguments
from lowlat.executors.prefill.chunk import BoundPrefill
from lowlat.executors.prefill.room import room_of
from lowlat.executors.watchdog import Watchdog
from lowlat.executors.workspace import SharedWorkspace
from lowlat.graphs import Bucket, BufferSet, Role, aligned_bytes
from lowlat.graphs.launch import Launch
from lowlat.kernels.moe.packing import PackedExperts
from lowlat.kernels.step.publish import LoopControl
from lowlat.program.program import Program

__all__ = ["KernelExecutor"]

POLLS_BETWEEN_CHECKS = 4096


class KernelExecutor:
    """Lowers programs to kernels; the two executors differ in how a step is issued.

    programs  the step's programs by bucket, the largest first
    prefills  the prefill programs by the positions that they take, ascending
    weights   canonical weights, on any device; experts may be packed already, see `DeviceWeights`
    watchdog  its factor and min_s, see `Watchdog`: a step or a prefill that lasts too long is a DeviceError
    """

    name = "kernels"
    asynchronous = False

    def __init__(
        self,
        programs: Mapping[Bucket, Program],
        prefills: Mapping[int, Program],
        weights: Mapping[str, torch.Tensor | PackedExperts],
        device: torch.device,
        *,
        cache_directory: Path | None = None,
        watchdog: tuple[float, float] = (10.0, 2.0),
    ) -> None:
        self.device = device
        self._step_watchdog, self._prefill_watchdog = Watchdog(*watchdog), Watchdog(*watchdog)
        self._num_prefills = 0
        self._failed = False
        self._programs = dict(programs)
        self.launcher = Launcher(device, cache_directory)
        self.stream = torch.cuda.Stream(device)
        every, largest = (*programs.values(), *prefills.values()), list(prefills.values())[-1]
        orders, experts = weight_permutations(programs.values()), expert_parts(programs.values())
        self._weights = DeviceWeights(weights, _matrices(every), device, orders, experts)
        specs = [spec for program in (*programs.values(), largest) for spec in program.specs(*STATE_ROLES)]
        with torch.cuda.stream(self.stream):
            self._arguments = ChunkArguments(largest, device)
            self.state = BufferSet(specs, device, pinned=pinned_names(specs), given=self._arguments.host)
            sizes = [sum(aligned_bytes(spec) for spec in program.specs(Role.SCRATCH)) for program in every]
            extra = room_of(largest, self._weights.shape).num_bytes
            self._arena = torch.zeros(max(*sizes, sizes[-1] + extra), dtype=torch.uint8, device=device)
            self.workspace = SharedWorkspace(device)
            self._constants = SharedConstants(device)
            self._scratch = {bucket: self._allocate(program) for bucket, program in programs.items()}
            self._groups = {bucket: self._lower(bucket) for bucket in programs}
            self.launcher.compile_ahead(
                call for groups in self._groups.values() for group in groups for call in group.calls
            )
            room = self._arena[sizes[-1] : sizes[-1] + extra]
            self._prefills = {size: self._bind(prefill, room) for size, prefill in prefills.items()}
        self._ring_head = self.state["ring_head"].numpy()
        # Polling no file takes 0.2 us and gives up the GIL for as long, which a thread that serves sockets needs while
        # this one waits for the card; sleep(0) takes 75 us, and sched_yield can give the core away.
        self._let_others_run = select.poll().poll
        self.synchronize()

    def _allocate(self, program: Program) -> BufferSet:
        specs = program.specs(Role.SCRATCH, Role.CONSTANT)
        return BufferSet(specs, self.device, self._constants.place(program.constants), arena=self._arena)

    def _bind(self, prefill: Program, room: torch.Tensor) -> BoundPrefill:
        """A prefill program over the shared buffers."""
        arguments = {**self._arguments.device, **first_rows(prefill, self._arguments.device)}
        buffers = {**self.state, **arguments, **self._allocate(prefill)}
        return BoundPrefill(prefill, buffers, self._weights, room=room, launcher=self.launcher)

    def _lower(self, bucket: Bucket, loop: LoopControl | None = None) -> tuple[Group, ...]:
        buffers = {**self.state, **self._scratch[bucket]}
        program = self._programs[bucket]
        return lower(Lowering(program, buffers, self._weights, self.launcher.card, self.workspace, loop), RULES)

    def prepare(self, bucket: Bucket) -> list[tuple[Group, list[Launch]]]:
        """The groups of a bucket's step with their launches, compiled and loaded."""
        return [(group, [self.launcher.prepare(call) for call in group.calls]) for group in self._groups[bucket]]

    def groups(self, bucket: Bucket) -> tuple[Group, ...]:
        """How a bucket's step is covered by kernels."""
        return self._groups[bucket]

    def owned(self) -> list[torch.Tensor]:
        """Every tensor that a launch may point into."""
        allocated = [*self.state.values(), self._arena, *self._constants.tensors()]
        return [*allocated, *self._arguments.device.values(), *self.workspace.tensors(), *self._weights.tensors()]

    def prefill(self, size: int) -> None:
        """Run the prefill program of so many positions over what the host has written."""
        with self._failures(), torch.cuda.stream(self.stream):
            self._arguments.send()
            self._run_prefill(size)
            self._wait_for_prefill()  # the host may write the next arguments then

    def _wait_for_prefill(self) -> None:
        """Return when the stream is idle. Raises DeviceError for a prefill that hangs."""
        self._num_prefills += 1
        polls, since, watchdog = 0, 0.0, self._prefill_watchdog
        while not self.stream.query():
            self._let_others_run(0)
            polls += 1
            if polls % POLLS_BETWEEN_CHECKS == 0:
                since = since or watchdog.begin()
                complaint = watchdog.complaint(since, self._num_prefills)
                if complaint is not None and not self.stream.query():
                    raise self._hangs(f"a prefill {complaint}")
        if since:
            watchdog.end(since)

    def _run_prefill(self, size: int) -> None:
        """A prefill program, its arguments on the device, on torch's current stream."""
        self._prefills[size].run()

    def wait_published(self, count: int) -> None:
        """Return when `count` steps have been published. Raises DeviceError when the device has failed or hangs."""
        head, polls, since, let_others_run = self._ring_head, 0, 0.0, self._let_others_run
        while head[0] < count:
            let_others_run(0)
            polls += 1
            if polls % POLLS_BETWEEN_CHECKS == 0:
                if self.idle() and head[0] < count:
                    raise DeviceError(f"the device is idle and has published {int(head[0])} of {count} steps")
                since = self._check_age(since, count)
        if since:
            self._step_watchdog.end(since)

    def _check_age(self, since: float, count: int) -> float:
        """When the wait for `count` steps was looked at first (0.0: now). Raises DeviceError for one that hangs."""
        since = since or self._step_watchdog.begin()
        complaint = self._step_watchdog.complaint(since, count)
        if complaint is not None and self._ring_head[0] < count:  # else it was this process that was stopped
            raise self._hangs(f"step {count} {complaint}")
        return since

    def _hangs(self, problem: str) -> DeviceError:
        """The error for work that hangs; what waits for the device later would wait for ever."""
        self._failed = True
        return DeviceError(f"the device {self.device} hangs: {problem}")

    def idle(self) -> bool:
        """Whether all that was started is done. Raises DeviceError when the device has failed."""
        with self._failures():
            return bool(self.stream.query())

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn torch's report of a failed device into a DeviceError: its context is lost, nothing can be retried."""
        try:
            yield
        except RuntimeError as error:
            self._failed = True
            raise DeviceError(f"the device {self.device} failed: {error}") from error

    @torch.inference_mode()
    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Zero KV blocks, the features at their ends included."""
        with self._failures(), torch.cuda.stream(self.stream):
            clear_blocks(self.state, blocks, self.device)

    def synchronize(self) -> None:
        """Wait until all that was started is done. Raises DeviceError when the device has failed."""
        with self._failures():
            self.stream.synchronize()

    def scratch(self, bucket: Bucket) -> BufferSet:
        """The scratch buffers and constants of a bucket; buckets share the memory of their scratch."""
        return self._scratch[bucket]

    def program(self, bucket: Bucket) -> Program:
        """The program of a bucket."""
        return self._programs[bucket]

    def set_hook(self, hook: OpHook | None) -> None:
        """Only the eager executor has hooks. Raises ConfigError for any."""
        if hook is not None:
            raise ConfigError(f"executor {self.name!r} runs no hooks between operations; use 'eager' or 'reference'")

    def close(self) -> None:
        """Drop every reference to programs, kernels, buffers and weights, and give their memory back.

        A device that has failed is not waited for.
        """
        if not self._failed:
            self.synchronize()
        self._programs.clear()
        self._groups.clear()
        self._scratch.clear()
        self._constants.clear()
        for prefill in self._prefills.values():
            prefill.clear()
        self._prefills.clear()
        self.workspace.clear()
        self._weights.clear()
        self.launcher.clear()
        self._arguments.clear()
        self.state.clear()
        del self._arena, self._ring_head
        if not self._failed:
            release_cached_memory(self.device)


def _matrices(programs: Sequence[Program]) -> set[str]:
    """Weights that products read."""
    return {op.weights["weight"] for program in programs for op in program.ops if op.kind == "linear"}
