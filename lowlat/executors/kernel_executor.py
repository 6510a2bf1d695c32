"""This module has the base of the eager and the graph executor: buffers, weights, lowered programs, the ring's wait.

It allocates all memory of programs before the first step: state on the device, the host's commands and the publications
in pinned memory, one arena of scratch for all programs, workspaces. A library's operations, in prefill, take memory of
their own while they run.
"""

import ctypes
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

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
from lowlat.executors.block_moves import BlockMover
from lowlat.executors.distributed.place import RankPlace
from lowlat.executors.distributed.watchdog import WATCHDOG, Watchdog
from lowlat.executors.launcher import Launcher
from lowlat.executors.peeks import Peeks, SentValues
from lowlat.executors.prefill_arguments import ChunkArguments
from lowlat.executors.residence.base import Residence
from lowlat.executors.workspace import PlannedWorkspaces, SharedWorkspace
from lowlat.graphs import Bucket, BufferSet, Role
from lowlat.graphs.launch import Launch
from lowlat.graphs.program import Program
from lowlat.graphs.scratch import ScratchPlaces, may_overlap, place_scratch
from lowlat.kernels.moe.packing import PackedExperts
from lowlat.kernels.step.publish import LoopControl
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.lowering.binding import Binding, sum_in_parts
from lowlat.lowering.counts import count_launches
from lowlat.lowering.device_weights import DeviceWeights
from lowlat.lowering.lower import LoweredGroup, lower, weight_layouts
from lowlat.lowering.memory import Workspaces, few_layers, largest, lowered_needs
from lowlat.lowering.weight_parts import expert_parts, packed_weights
from lowlat.step.variants import PASS

__all__ = ["DEFAULT", "KernelExecutor", "KernelOptions", "Size", "abandon"]

POLLS_BETWEEN_CHECKS = 4096
POLLS_WHILE_STOPPING = 64  # a loop that was asked to stop ends within two steps
Size = Bucket | int  # the key of a program: a step's bucket, or prefill's number of positions


@dataclass(frozen=True)
class KernelOptions:
    """How programs are lowered to kernels and run on one device.

    fuse             whether operations are fused; False: every operation has its own launches
    cache_directory  of compiled kernels; None: `kernel_cache_directory`
    watchdog         its factor and min_s, see `Watchdog`: a step or a prefill that lasts too long is a DeviceError
    place            of a rank among several, on devices of their own, which `ParallelExecutor` runs together
    residence        the memory of weights, paged state and scratch, if they can leave the device; None: they stay
    gpu              the device's properties, as `gpu_of` reads them; None: they are read at the start
    planned          workspaces that were found before. They are found at the start for programs that it lacks, and for
                     all programs if it was made for another GPU or another way of lowering
    """

    fuse: bool = True
    cache_directory: Path | None = None
    watchdog: tuple[float, float] = WATCHDOG
    place: RankPlace | None = None
    residence: Residence | None = None
    gpu: Gpu | None = None
    planned: PlannedWorkspaces | None = None


DEFAULT = KernelOptions()


def _check_memory(program: Program, groups: Sequence[LoweredGroup]) -> None:
    """Raise DeviceError if a call uses a buffer that got no memory, since the plan said that no call uses it."""
    for group in groups:
        if any(tensor.is_meta for call in group.calls for tensor in call.tensors):
            raise DeviceError(f"{program.name}: {group.name} is given a buffer that is planned as unused")


def abandon(held: list[Any]) -> None:
    """Keep objects for ever. If torch freed memory of a failed device, or pinned host memory, it would end the process;
    the driver frees it at the process's end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


class KernelExecutor(ABC):
    """Lowers programs to launches; the two executors issue them in different ways.

    programs  the step's programs by bucket, the largest first, first tokens' steps included
    prefills  the prefill programs by number of positions, ascending; see `build_prefills`
    weights   canonical weights, on any device; experts may be packed already, see `DeviceWeights`
    options   how programs are lowered and run
    """

    name = "kernels"
    asynchronous = False
    switches = False  # whether a choice of the device decides what runs next, without the host

    def __init__(
        self,
        programs: Mapping[Bucket, Program],
        prefills: Mapping[int, Program],
        weights: Mapping[str, torch.Tensor | PackedExperts],
        device: torch.device,
        options: KernelOptions = DEFAULT,
    ) -> None:
        place, residence, fuse = options.place, options.residence, options.fuse
        self.device, self.residence = device, residence
        self._place = place
        self._look_at_others: Callable[[], None] | None = None
        self._fuse = fuse
        self._step_watchdog, self._prefill_watchdog = Watchdog(*options.watchdog), Watchdog(*options.watchdog)
        self._num_prefills = 0
        self._failed = False
        self._peeks = Peeks(on_gpu=device.type == "cuda")
        self._sent = SentValues()
        largest_first = {size: prefills[size] for size in sorted(prefills, reverse=True)}
        self._programs: dict[Size, Program] = dict([*programs.items(), *largest_first.items()])
        is_shared = place is not None and place.peers.shares_gpus
        self.launcher = Launcher(device, options.cache_directory, gpu=options.gpu, is_shared=is_shared)
        self.stream = torch.cuda.Stream(device)
        every = list(self._programs.values())
        self._is_invariant = sum_in_parts(every)
        self._weights = DeviceWeights(
            weights, packed_weights(every), device, weight_layouts(every, self.launcher.gpu, fuse=fuse),
            expert_parts(every, weights), place=None if residence is None else residence.keep,
        )  # fmt: skip
        if residence is not None:
            torch.cuda.current_stream(device).synchronize()  # its copies are this stream's, and steps have their own
        with torch.cuda.stream(self.stream):
            planned = self._suiting(options.planned)
            self._allocate_buffers([*programs.values(), prefills[max(prefills)]], prefills, planned)
            self._lower_programs(planned)
        # Polling no file takes 0.2 us and gives up the GIL for as long, which a thread that serves sockets needs while
        # this one waits for the GPU; sleep(0) takes 75 us, and sched_yield can give the core away.
        self._let_others_run = select.poll().poll
        self._synchronize()

    def _suiting(self, planned: PlannedWorkspaces | None) -> PlannedWorkspaces | None:
        """The plan, if its programs were lowered in this executor's way; else None."""
        rank = (0, 1) if self._place is None else (self._place.number, self._place.peers.size)
        suits = planned is not None and planned.suits(
            self.launcher.gpu, rank, fuse=self._fuse, is_invariant=self._is_invariant
        )
        return planned if suits else None

    def _allocate_buffers(
        self, with_state: Sequence[Program], prefills: Mapping[int, Program], planned: PlannedWorkspaces | None
    ) -> None:
        """Allocate the state, and one arena for the scratch of every program.

        with_state  programs that declare all state buffers, with their largest sizes
        planned     the plan; buffers that no launch uses get no memory
        """
        place, residence, device = self._place, self.residence, self.device
        leader = None if place is None else place.leader
        self._arguments: ChunkArguments = ChunkArguments(
            [prefills[max(prefills)], *(prefills[PASS] for _ in range(PASS in prefills))],
            device,
            None if leader is None else leader._arguments,
        )
        specs = [spec for program in with_state for spec in program.specs(*STATE_ROLES)]
        given = self._arguments.host if place is None or place.given is None else place.given
        zeros = None if residence is None else residence.zeros
        self.state = BufferSet(specs, device, pinned=pinned_names(specs), given=given, paged=zeros)
        self._ring_head = self.state["ring_head"].numpy()
        places = {
            size: place_scratch(program, () if planned is None else planned.unused_by(program))
            for size, program in self._programs.items()
        }
        most = max(each.num_bytes for each in places.values())
        if zeros is None:
            self._arena = torch.zeros(most, dtype=torch.uint8, device=device)
        else:
            self._arena = zeros((most,), torch.uint8)
        self.workspace = SharedWorkspace(device, zeros)
        self._constants = SharedConstants(device)
        self._scratch = {size: self._allocate(self._programs[size], each) for size, each in places.items()}

    def _lower_programs(self, planned: PlannedWorkspaces | None) -> None:
        """Lower all programs, and compile the kernels that they launch."""
        # the largest size of all programs first: a larger request later would get other memory than earlier launches
        self.workspace.reserve(self._find_workspaces(planned))
        self._groups = {size: self._lower(size) for size in self._programs}
        self.launcher.compile_ahead(
            call for groups in self._groups.values() for group in groups for call in group.calls
        )
        self.counts = count_launches((self._programs[size].name, groups) for size, groups in self._groups.items())

    def _allocate(self, program: Program, places: ScratchPlaces) -> BufferSet:
        specs, constants = program.specs(Role.SCRATCH, Role.CONSTANT), self._constants.place(program.constants)
        held = (spec for spec in specs if spec.role is not Role.SCRATCH or spec.name in places.offsets)
        return BufferSet(held, self.device, constants, arena=self._arena, offsets=places.offsets)

    def _binding(self, size: Size, program: Program, loop: LoopControl | None = None) -> Binding:
        """The binding of a bucket's or a prefill's program, or of one of its operations."""
        arguments = self._arguments.device
        scratch = self._scratch[size]
        unused = {spec.name: spec.without_memory() for spec in program.specs(Role.SCRATCH) if spec.name not in scratch}
        buffers = {**self.state, **scratch, **unused}
        if not isinstance(size, Bucket):
            buffers |= {**arguments, **first_rows(program, {**self.state, **arguments})}
        place = self._place
        if place is not None:
            buffers["command_tail"] = place.command_tail
        return Binding(
            program, buffers, self._weights, self.launcher.gpu, self.workspace, loop, self.switches, place,
            is_invariant=self._is_invariant,
        )  # fmt: skip

    def _find_workspaces(self, planned: PlannedWorkspaces | None) -> Workspaces:
        """The workspaces of all programs: planned ones, and for others by lowering a few of their layers."""
        few = (
            self._binding(size, few_layers(program, self._weights.form))
            for size, program in self._programs.items()
            if planned is None or not planned.has(program)
        )
        return largest(lowered_needs(few, fuse=self._fuse).workspaces, {} if planned is None else planned.sizes)

    def _lower(self, size: Size, loop: LoopControl | None = None) -> tuple[LoweredGroup, ...]:
        place = self._place
        groups = lower(self._binding(size, self._programs[size], loop), fuse=self._fuse)
        if may_overlap(self._programs[size]):
            _check_memory(self._programs[size], groups)
        return groups if place is None else place.forwarding(groups, self.state["command_tail"])

    def prepare(self, size: Size) -> list[tuple[LoweredGroup, list[Launch]]]:
        """The groups of a program with their compiled and loaded launches."""
        return [(group, [self.launcher.prepare(call) for call in group.calls]) for group in self._groups[size]]

    def groups(self, size: Size) -> tuple[LoweredGroup, ...]:
        """The lowered groups of a bucket's step, or of prefill by number of positions."""
        return self._groups[size]

    def owned(self) -> list[torch.Tensor]:
        """Every tensor that a launch may point into."""
        allocated = [*self.state.values(), self._arena, *self._constants.tensors()]
        others = [] if self._place is None else self._place.peers.tensors()
        workspaces = self.workspace.tensors()
        return [*allocated, *self._arguments.device.values(), *workspaces, *self._weights.tensors(), *others]

    @abstractmethod
    def _run(self, size: Size) -> None:
        """Issue a program's launches on the executor's stream, in order."""

    def step(self, bucket: Bucket, meanwhile: Callable[[], None] | None = None) -> None:
        """Issue one step, then call `meanwhile`; the step's publication may come later, see `wait_published`."""
        self._run(bucket)
        if meanwhile is not None:
            meanwhile()

    def wait_until(self, seen: Callable[[], bool]) -> None:
        """Return when `seen` returns True, for an issued step. Raises DeviceError when the device fails or hangs."""
        polls, since, count = 0, 0.0, int(self._ring_head[0]) + 1
        while not seen():
            self._let_others_run(0)
            polls += 1
            if polls % POLLS_BETWEEN_CHECKS == 0:
                if self.idle() and not seen():
                    raise DeviceError("the device is idle and has not told which rows its step verifies")
                since = self._check_age(since, count)

    def prefill(self, size: int, first: Bucket | None = None, passes: int = 0) -> None:
        """Run the prefill program of `size` positions, then passes, then the program that chooses the first token."""
        self.wait_for_prefill(self.start_prefill(size, first, passes))

    def start_prefill(self, size: int, first: Bucket | None = None, passes: int = 0) -> Callable[[], bool]:
        """Start what `prefill` runs; returns a function that says whether it has ended."""
        entry = int(self._ring_head[0])
        with self._failures(), torch.cuda.stream(self.stream):
            self._arguments.send()
            self._run(size)
            for _ in range(passes):
                self._run(PASS)
            if first is None:
                return self.stream.query
            self._run(first)
            return lambda: bool(self._ring_head[0] > entry)

    def wait_for_prefill(self, ended: Callable[[], bool]) -> None:
        """Return when a prefill has ended: the host may then write new arguments. Raises DeviceError if it hangs."""
        self._num_prefills += 1
        polls, since, watchdog = 0, 0.0, self._prefill_watchdog
        with self._failures():
            while not ended():
                self._let_others_run(0)
                polls += 1
                if polls % POLLS_BETWEEN_CHECKS == 0:
                    if self.idle() and not ended():
                        raise DeviceError("the device is idle and has published no first token")
                    since = since or watchdog.begin()
                    complaint = watchdog.complaint(since, self._num_prefills)
                    if complaint is not None and not ended():
                        raise self._hangs(f"a prefill {complaint}")
        if since:
            watchdog.end(since)

    def wait_published(self, count: int) -> None:
        """Return when `count` steps have been published. Raises DeviceError when the device has failed or hangs."""
        if not self._await_ring(count):
            raise DeviceError(f"the device is idle and has published {int(self._ring_head[0])} of {count} steps")

    def wait_for_ranks(self, count: int) -> None:
        """Return when the only rank has published `count` steps, see `wait_published`."""
        self.wait_published(count)

    def _await_ring(self, count: int, stopping: Any = (0,)) -> bool:
        """Return True when `count` steps have been published, False when the device becomes idle before.

        stopping  its first value is not 0 while a loop that was asked to stop still runs: the device is then checked
                  more often
        """
        head, polls, since, let_others_run = self._ring_head, 0, 0.0, self._let_others_run
        while head[0] < count:
            let_others_run(0)
            polls += 1
            if polls % (POLLS_WHILE_STOPPING if stopping[0] else POLLS_BETWEEN_CHECKS) == 0:
                if self.idle():
                    break
                since = self._check_age(since, count)
        if since:
            self._step_watchdog.end(since)
        return bool(head[0] >= count)

    def _check_age(self, since: float, count: int) -> float:
        """When the wait for `count` steps was looked at first (0.0: now). Raises DeviceError for one that hangs."""
        since = since or self._step_watchdog.begin()
        complaint = self._step_watchdog.complaint(since, count)
        if complaint is not None and self._ring_head[0] < count:  # else it was this process that was stopped
            raise self._hangs(f"step {count} {complaint}")
        return since

    def _hangs(self, problem: str) -> DeviceError:
        """Mark the device as failed, since a later wait for it would never end; returns the error."""
        self._failed = True
        return DeviceError(f"the device {self.device} hangs: {problem}")

    def look_at_others(self, look: Callable[[], None]) -> None:
        """Call `look` whenever a long wait checks the device; it raises DeviceError if another rank has failed."""
        self._look_at_others = look

    @property
    def failed(self) -> bool:
        """Whether the device has failed or hangs; the host then does not wait for it."""
        return self._failed

    def give_up(self) -> None:
        """Treat the device as failed, since another rank's has failed and the process must end."""
        self._failed = True

    def settle(self, until: float) -> None:
        """Wait for started work until a time of the monotonic clock; work that then still runs counts as hung."""
        while not self._failed:
            try:
                if self.stream.query():
                    return
            except RuntimeError:
                self._failed = True
            if time.monotonic() > until:
                self._failed = True

    def idle(self) -> bool:
        """Whether all started work is done. Raises DeviceError when the device, or another rank's, has failed."""
        if self._look_at_others is not None:
            self._look_at_others()
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

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device current in the thread. Raises DeviceError, which names it, if it has failed."""
        with self._failures(), torch.cuda.device(self.device):
            yield

    @torch.inference_mode()
    def write_state(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write buffers of the state by name, on the executor's stream.

        Copies from pinned values are asynchronous; the values are kept until the copies have ended.
        """
        with self._failures(), torch.cuda.stream(self.stream):
            pinned = [value for value in values.values() if value.is_pinned()]
            for name, value in values.items():
                self.state[name].copy_(value, non_blocking=value.is_pinned())
            if pinned:
                self._sent.keep(pinned)

    @torch.inference_mode()
    def peek(self, buffers: Sequence[torch.Tensor]) -> Callable[[], Sequence[torch.Tensor] | None]:
        """See `Executor.peek`."""
        with self._failures(), torch.cuda.stream(self.stream):
            look = self._peeks.start(buffers)
            self.counts.copies += len(buffers)

        def found() -> Sequence[torch.Tensor] | None:
            with self._failures():
                return look()

        return found

    @cached_property
    def mover(self) -> BlockMover:
        """The copies of blocks between this executor's state and host memory."""
        return BlockMover(self.state, self.device, self.stream)

    @property
    def movers(self) -> Sequence[BlockMover]:
        """The only mover."""
        return (self.mover,)

    @torch.inference_mode()
    def clear_blocks(self, blocks: Sequence[int], pool: str = "") -> None:
        """Zero KV blocks of a pool, the features at their ends included."""
        with self._failures(), torch.cuda.stream(self.stream):
            self.counts.copies += 1
            clear_blocks(self.state, blocks, self.device, pool)

    def synchronize(self) -> None:
        """Wait until all started work is done. Raises DeviceError when the device has failed."""
        self.counts.synchronisations += 1
        self._synchronize()

    def _synchronize(self) -> None:
        """The wait, not counted: for loading and closing."""
        with self._failures():
            self.stream.synchronize()

    def scratch(self, bucket: Bucket) -> BufferSet:
        """The scratch buffers and constants of a bucket; programs share the memory of their scratch."""
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
        if self._failed:
            held = self._peeks.memory, self._sent.held, vars(self).get("mover")  # none is made where none was
            abandon([self.owned(), self.state, self._arguments, self._ring_head, self.residence, *held])
        else:
            self._synchronize()
        self._look_at_others = None
        self._programs.clear()
        self._groups.clear()
        self._scratch.clear()
        self._constants.clear()
        self.workspace.clear()
        self._weights.clear()
        self.launcher.clear()
        self._arguments.clear()
        self.state.clear()
        del self._arena, self._ring_head
        if not self._failed:
            if self.residence is not None:
                self.residence.close()
            release_cached_memory(self.device)
