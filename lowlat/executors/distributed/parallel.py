"""A parallel executor runs one graph executor for each rank; one thread starts their graphs back to back.

Every rank has its own device, its part of the weights, and its own control state, which is the same on all ranks. The
host writes and reads the control state of rank 0. Rank 0 forwards the host's commands to the others.
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

PATIENCE_S = 1.0  # how long the others may take to end after one rank has failed
ALL_REDUCE = "gather_ranks"
Answer = TypeVar("Answer")


def exchanged_rows(programs: Iterable[Program], kind: str = ALL_REDUCE) -> dict[int, int]:
    """The most rows that the programs' operations of a kind exchange among ranks, by the rows' width.

    kind  "gather_ranks" for all exchanged rows, "sum_ranks" for those that are summed
    """
    found: dict[int, int] = {}
    for program in programs:
        for op in program.ops:
            if op.kind == kind:
                *_, rows, width = program.buffers[op.writes["out"]].shape
                found[width] = max(rows, found.get(width, 0))
    return found


def all_reduce_bytes(programs: Sequence[Program]) -> int:
    """The most bytes that a rank's programs need for all-reduces on its device; 0 if they exchange nothing."""
    outs = [program.buffers[op.writes["out"]] for program in programs for op in program.ops if op.kind == ALL_REDUCE]
    if not outs:
        return 0
    return planned_bytes(outs[0].shape[0], exchanged_rows(programs), exchanged_rows(programs, "sum_ranks"))


class ParallelExecutor:
    """Runs all ranks as one executor; see `lowlat.executors.LoopingExecutor`.

    make   makes the executor of a rank from its number and rank 0's executor (None for rank 0); it must not wait for
           other ranks
    peers  the memory through which ranks exchange
    If one rank fails, all ranks stop waiting, and DeviceError names the failed device.
    """

    name = "graph"
    asynchronous = True

    def __init__(self, make: Callable[[int, GraphExecutor | None], GraphExecutor], peers: PeerMemory) -> None:
        self.peers = peers
        peers.give_up()  # a rank's launches while it is made must not wait for other ranks
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
        """End the waits of all ranks if the body fails; raise DeviceError if a rank gave up."""
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
        """Raise DeviceError if ranks have given up, or the device of a rank other than 0 has failed."""
        if self._abort[0]:
            raise DeviceError(self._problem())
        for rank in self.ranks[1:]:
            rank.idle()

    def _end_waits(self) -> None:
        """Let all ranks end within PATIENCE_S; the host never again waits for one that does not."""
        self.peers.give_up()
        patient = time.monotonic() + PATIENCE_S
        for rank in self.ranks:
            rank.settle(patient)

    def _ask_each(self, ask: Callable[[GraphExecutor], Answer]) -> list[Answer]:
        """Call `ask` for each rank with its device current; returns the answers in order of rank."""
        with self._together():
            answers = []
            for rank in self.ranks:
                with rank.current():
                    answers.append(ask(rank))
            return answers

    def step(self, bucket: Bucket, meanwhile: Callable[[], None] | None = None) -> None:
        """Start one step on all ranks; see `Executor.step`."""
        self._ask_each(lambda rank: rank.step(bucket))
        if meanwhile is not None:
            meanwhile()

    def prefill(self, size: int, first: Bucket | None = None, passes: int = 0) -> None:
        """Run a prefill on all ranks, until the host may write the next one's inputs; see `Executor.prefill`."""
        ends = self._ask_each(lambda rank: rank.start_prefill(size, first, passes))
        with self._together():
            for rank, ended in zip(self.ranks, ends, strict=True):
                rank.wait_for_prefill(ended)

    def wait_until(self, seen: Callable[[], bool]) -> None:
        """See `Executor.wait_until`."""
        with self._together():
            self._leader.wait_until(seen)

    def wait_published(self, count: int) -> None:
        """See `Executor.wait_published`; if ranks gave up, the step has failed, whatever it published."""
        with self._together():
            self._leader.wait_published(count)

    def wait_for_ranks(self, count: int) -> None:
        """See `Executor.wait_for_ranks`: each rank publishes its progress in its own ring."""
        with self._together():
            for rank in self.ranks[1:]:
                rank.wait_published(count)

    def start_loop(self, bucket: Bucket, budget: int) -> None:
        """Start a loop on all ranks; they leave it at the same step. See `LoopingExecutor.start_loop`."""
        self._ask_each(lambda rank: rank.start_loop(bucket, budget))

    def stop_loop(self) -> None:
        """See `LoopingExecutor.stop_loop`: rank 0 forwards the stop to the others when it begins a step."""
        self._leader.stop_loop()

    def wait_loop(self, count: int) -> bool:
        """See `LoopingExecutor.wait_loop`."""
        with self._together():
            return self._leader.wait_loop(count)

    @cached_property
    def mover(self) -> RankMover:
        """The mover that copies blocks of all ranks together."""
        return RankMover(self.movers)

    @property
    def movers(self) -> Sequence[BlockMover]:
        """Each rank's mover."""
        return [rank.mover for rank in self.ranks]

    def clear_blocks(self, blocks: Sequence[int], pool: str = "") -> None:
        """Zero KV blocks of a pool on every rank."""
        self._ask_each(lambda rank: rank.clear_blocks(blocks, pool))

    def synchronize(self) -> None:
        """Wait until all started work is done on all ranks."""
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
        """The scratch buffers of rank 0."""
        return self._leader.scratch(bucket)

    def program(self, bucket: Bucket) -> Program:
        """The program of rank 0."""
        return self._leader.program(bucket)

    def set_hook(self, hook: OpHook | None) -> None:
        """Raise ConfigError for any hook, as `GraphExecutor` does."""
        self._leader.set_hook(hook)

    def close(self) -> None:
        """Close all ranks, then free the peer memory.

        If one rank has failed, nothing is freed on the others either: torch frees its cache on all GPUs at once.
        """
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
