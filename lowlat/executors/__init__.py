"""An executor runs Programs. This module has the protocol that all executors share.

The reference executor calls each operation's torch reference, on any device. The eager and graph executors lower the
same programs to kernels on a GPU.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from lowlat.executors.block_moves import BlockMover, ContentMover
from lowlat.executors.residence.base import Residence
from lowlat.graphs import Bucket, BufferSet
from lowlat.graphs.program import Op, Program
from lowlat.lowering.launch_counts import LaunchCounts
from lowlat.step.variants import bodies_of

__all__ = ["Executor", "LaunchCounts", "LoopingExecutor", "OpHook", "chosen_body"]

OpHook = Callable[[Op, Mapping[str, torch.Tensor]], None]


class Executor(Protocol):
    """Owns every buffer and weight of a runtime's programs, and runs them.

    state         the buffers that outlive a step, with the host's commands and the publications; while steps run, the
                  host accesses only these two roles
    asynchronous  whether `step` returns before the step has run, so that the host may launch the next step while it
                  still reads this one's publication
    counts        the launches of its programs
    residence     the memory that can leave the device; None: all of it stays
    """

    name: str
    asynchronous: bool
    device: torch.device
    state: BufferSet
    residence: Residence | None

    @property
    def counts(self) -> LaunchCounts:
        """The current counts."""

    def step(self, bucket: Bucket, meanwhile: Callable[[], None] | None = None) -> None:
        """Start one step in the bucket; its publication is in the ring when this returns, or later.

        meanwhile  the host's part of the step: called after its first stage was started, before its draw
        """

    def wait_until(self, seen: Callable[[], bool]) -> None:
        """Return when `seen` returns True, for a value that a started step writes. Raises DeviceError if it fails."""

    def wait_published(self, count: int) -> None:
        """Return when `count` steps in all have been published. Raises DeviceError when the device has failed."""

    def wait_for_ranks(self, count: int) -> None:
        """Return when every rank has published `count` steps: no rank then reads what the host wrote for these steps.
        Raises DeviceError when a device has failed."""

    def prefill(self, size: int, first: Bucket | None = None, passes: int = 0) -> None:
        """Run the prefill program of `size` positions, or of REFRESH, over the host's `prefill_*` buffers.

        passes  how often the program of PASS runs after it, before that of the first token; its results are there when
                this returns
        first   after a prompt's last chunk: a first token's bucket, whose program chooses the first token. Its
                publication is in the ring when this returns, and counts as a step; its drafts may be made later
        """

    def write_state(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write buffers of every rank's state by name, after all work that was started before."""

    def peek(self, buffers: Sequence[torch.Tensor]) -> Callable[[], Sequence[torch.Tensor] | None]:
        """Start copies of the first rank's buffers to the host, after all work that was started before.

        Returns a function that returns the copies, or None while they are not complete; no step waits for them.
        """

    @property
    def mover(self) -> ContentMover:
        """The object that copies blocks between the state of all ranks and host memory."""

    @property
    def movers(self) -> Sequence[BlockMover]:
        """The objects that copy each rank's blocks and slots' rows, in order of ranks."""

    def clear_blocks(self, blocks: Sequence[int], pool: str = "") -> None:
        """Zero KV blocks of a pool that a failed request may have filled with NaN."""

    def synchronize(self) -> None:
        """Wait until all started work is done."""

    def scratch(self, bucket: Bucket) -> BufferSet:
        """The scratch buffers of a bucket, for debugging and comparison."""

    def program(self, bucket: Bucket) -> Program:
        """The program of a bucket."""

    def set_hook(self, hook: OpHook | None) -> None:
        """Call `hook(op, arguments)` after every operation; None: no hook, and no cost."""

    def close(self) -> None:
        """Release buffers and weights."""


@runtime_checkable
class LoopingExecutor(Executor, Protocol):
    """An executor whose device can repeat steps by itself; it publishes each one as `step` does."""

    def start_loop(self, bucket: Bucket, budget: int) -> None:
        """Start 1 to `budget` steps in the bucket; the loop ends earlier when no slot is active.

        The ring must have capacity for all of them. A loop that follows a running one runs at least one step, even if
        the first one ends because no slot is active. No loop may be started after one that was asked to stop.
        """

    def stop_loop(self) -> None:
        """Ask the loop to end after the current step or the next; returns at once.

        A loop that is queued after it ends after one step.
        """

    def wait_loop(self, count: int) -> bool:
        """Return True when `count` steps in all have been published, False when all loops have ended before.

        Raises DeviceError when the device has failed.
        """


def chosen_body(bucket: Bucket, state: Mapping[str, torch.Tensor], run: Callable[[Bucket], None]) -> Bucket:
    """Run the opening of a step that chooses its draft length; returns the chosen body.

    state  with `draft_length_choice`
    run    runs a program and waits until it has written the state
    """
    run(bucket)
    return bodies_of(bucket)[int(state["draft_length_choice"])]
