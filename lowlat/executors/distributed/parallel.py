"""A parallel executor runs one graph executor a rank, by one thread that starts their graphs back to back.

Every rank has a device of its own, its part of the weights, and control state of its own, which is the same on all:
the host writes and reads the first one's, whose commands the others read as rank 0 forwards them.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import TypeVar

import torch

from lowlat.errors import DeviceError
from lowlat.executors import LaunchCounts, OpHook
from lowlat.executors.block_moves import BlockMover
from lowlat.executors.distributed.peers import PeerMemory, planned_bytes
from lowlat.executors.distributed.rank_moves import RankMover
from lowlat.executors.graph import GraphExecutor
from lowlat.executors.kernel_executor import abandon
from lowlat.executors.residence.base import Residence
from lowlat.executors.residence.ranks import RankResidences
from lowlat.graphs import Bucket, BufferSet
from lowlat.graphs.program import Program

__all__ = ["ParallelExecutor", "all_reduce_bytes", "exchanged_rows"]

PATIENCE_S = 1.0  # for ranks to end after one has failed
ALL_REDUCE = "gather_ranks"
Answer = TypeVar("Answer")


def exchanged_rows(programs: Iterable[Program], kind: str = ALL_REDUCE) -> dict[int, int]:
    """The most rows that programs exchange among ranks, by their width; of `sum_ranks`, those that are added up."""
    found: dict[int, int] = {}
    for program in programs:
        for op in program.ops:
            if op.kind == kind:
                *_, rows, width = program.buffers[op.writes["out"]].shape
                found[width] = max(rows, found.get(width, 0))
    return found


def all_reduce_bytes(programs: Sequence[Program]) -> int:
    """The most bytes on a rank's device of memory for its programs' exchanges; 0 where they exchange nothing."""
    outs = [program.buffers[op.writes["out"]] for program in programs for op in program.ops if op.kind == ALL_REDUCE]
    if not outs:
        return 0
    return planned_bytes(outs[0].shape[0], exchanged_rows(programs), exchanged_rows(programs, "sum_ranks"))


class ParallelExecutor:
    """Ranks as one executor, see `lowlat.executors.LoopingExecutor`.

    make   makes a rank's executor by its number, given the first one's (None for itself); it may not wait for others
    peers  the memory by which they exchange
    A failure of one ends the waits of all, and is a DeviceError that names its device.
    """

    name = "graph"
    asynchronous = True

    def __init__(self, make: Callable[[int, GraphExecutor | None], GraphExecutor], peers: PeerMemory) -> None:
        self.peers = peers
        peers.give_up()  # what a rank runs while it is made, it runs for itself
        self.ranks: list[GraphExecutor] = []
        try:
            for number, device in enumerate(peers.devices):
                with torch.cuda.device(device):
                    self.ranks.append(make(number, self.ranks[0] if self.ranks else None))
        except Exception:
            self.close()
            raise
        peers.reset()
        self._leader = self.ranks[0]
        self._leader.look_at_others(self._look)
        self._abort = peers.abort.numpy()
        self.device, self.state = self._leader.device, self._leader.state
        own = [(rank.device, rank.residence) for rank in self.ranks if rank.residence is not None]
        self.residence: Residence | None = RankResidences(own) if own else None

    @property
    def counts(self) -> LaunchCounts:
        """The counts of all ranks together."""
        return LaunchCounts.of_ranks(rank.counts for rank in self.ranks)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """A failure of one rank ends all."""
        try:
            yield
        except DeviceError:
            self._end_waits()
            raise
        if self._abort[0]:
            raise DeviceError(self._problem())

    def _problem(self) -> str:
        return f"tensor_parallel_size {len(self.ranks)}: {self.peers.problem()}"

    def _look(self) -> None:
        """Raise DeviceError where ranks have given up, or another one's device has failed."""
        if self._abort[0]:
            raise DeviceError(self._problem())
        for rank in self.ranks[1:]:
            rank.idle()

    def _end_waits(self) -> None:
        """Let all ranks end; one that does not is never waited for again."""
        self.peers.give_up()
        patient = time.monotonic() + PATIENCE_S
        for rank in self.ranks:
            rank.settle(patient)

    def _ask_each(self, ask: Callable[[GraphExecutor], Answer]) -> list[Answer]:
        """The answers of all ranks, each asked while its device is the thread's own."""
        with self._together():
            answers = []
            for rank in self.ranks:
                with rank.current():
                    answers.append(ask(rank))
            return answers

    def step(self, bucket: Bucket, meanwhile: Callable[[], None] | None = None) -> None:
        """Start one step on all; see `Executor.step`."""
        self._ask_each(lambda rank: rank.step(bucket))
        if meanwhile is not None:
            meanwhile()

    def prefill(self, size: int, first: Bucket | None = None, passes: int = 0) -> None:
        """Run a prefill on all, until the host may write the next; see `Executor.prefill`."""
        ends = self._ask_each(lambda rank: rank.start_prefill(size, first, passes))
        with self._together():
            for rank, ended in zip(self.ranks, ends, strict=True):
                rank.wait_for_prefill(ended)

    def wait_until(self, seen: Callable[[], bool]) -> None:
        """See `Executor.wait_until`."""
        with self._together():
            self._leader.wait_until(seen)

    def wait_published(self, count: int) -> None:
        """See `Executor.wait_published`; a step in which ranks gave up counts as failed, whatever it published."""
        with self._together():
            self._leader.wait_published(count)

    def wait_for_ranks(self, count: int) -> None:
        """See `Executor.wait_for_ranks`: each rank has a ring of its own, by which it tells how far it is."""
        with self._together():
            for rank in self.ranks[1:]:
                rank.wait_published(count)

    def start_loop(self, bucket: Bucket, budget: int) -> None:
        """Start a loop on all, which leave it at the same step; see `LoopingExecutor.start_loop`."""
        self._ask_each(lambda rank: rank.start_loop(bucket, budget))

    def stop_loop(self) -> None:
        """See `LoopingExecutor.stop_loop`: the first rank tells the others as it begins a step."""
        self._leader.stop_loop()

    def wait_loop(self, count: int) -> bool:
        """See `LoopingExecutor.wait_loop`."""
        with self._together():
            return self._leader.wait_loop(count)

    @cached_property
    def mover(self) -> RankMover:
        """The copies of blocks of all ranks together."""
        return RankMover(self.movers)

    @property
    def movers(self) -> Sequence[BlockMover]:
        """Of each rank."""
        return [rank.mover for rank in self.ranks]

    def clear_blocks(self, blocks: Sequence[int], pool: str = "") -> None:
        """Zero KV blocks of a pool, of every rank."""
        self._ask_each(lambda rank: rank.clear_blocks(blocks, pool))

    def synchronize(self) -> None:
        """Wait until all that was started is done on all."""
        with self._together():
            for rank in self.ranks:
                rank.synchronize()

    def mark(self) -> torch.cuda.Event:
        """See `GraphExecutor.mark`, of the first rank."""
        with self._leader.current():
            return self._leader.mark()

    def write_state(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write into the state of every rank; see `Executor.write_state`."""
        self._ask_each(lambda rank: rank.write_state(values))

    def peek(self, buffers: Sequence[torch.Tensor]) -> Callable[[], Sequence[torch.Tensor] | None]:
        """See `Executor.peek`."""
        with self._together(), self._leader.current():
            found = self._leader.peek(buffers)

        def look() -> Sequence[torch.Tensor] | None:
            with self._together():
                return found()

        return look

    def forget(self) -> None:
        """See `GraphExecutor.forget`: every rank forgets."""
        self._ask_each(lambda rank: rank.forget())

    def scratch(self, bucket: Bucket) -> BufferSet:
        """The first rank's."""
        return self._leader.scratch(bucket)

    def program(self, bucket: Bucket) -> Program:
        """The first rank's."""
        return self._leader.program(bucket)

    def set_hook(self, hook: OpHook | None) -> None:
        """Raises ConfigError for any, as `GraphExecutor` does."""
        self._leader.set_hook(hook)

    def close(self) -> None:
        """Close all ranks, then free the memory of exchanges. Where one has failed, nothing of the others is freed
        either: torch frees what it keeps on all GPUs at once."""
        failed = any(rank.failed for rank in self.ranks)
        if failed:
            self._end_waits()
            for rank in self.ranks:
                rank.give_up()
        for rank in self.ranks[:1]:
            rank.stop_loop()
        for rank in reversed(self.ranks):
            with nullcontext() if failed else torch.cuda.device(rank.device):
                rank.close()
        if failed:
            abandon([self.peers.tensors()])
        self.peers.clear()
