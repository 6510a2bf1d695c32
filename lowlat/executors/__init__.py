"""An executor runs Programs: this is the protocol of all of them.

The reference executor runs each operation by its torch meaning, on any device; the eager and graph executors are for
GPUs and lower the same programs to kernels.
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

    `state` holds the buffers that outlive a step, the host's commands and the publications among them; the host
    writes and reads only those two roles while steps run. `asynchronous` says whether `step` returns before the step
    has run, so that the next one may be launched while the host still reads this one's publication. `counts` says what
    its programs launch. `residence` has the memory that can leave the device; None: all of it stays.
    """

    name: str
    asynchronous: bool
    device: torch.device
    state: BufferSet
    residence: Residence | None

    @property
    def counts(self) -> LaunchCounts:
        """As they stand now."""

    def step(self, bucket: Bucket, meanwhile: Callable[[], None] | None = None) -> None:
        """Start one step in the bucket; its publication is in the ring when this returns or later.

        meanwhile  the host's part of the step: called when its first stage was started, before it draws
        """

    def wait_until(self, seen: Callable[[], bool]) -> None:
        """Return when `seen` says that a started step has written something. Raises DeviceError when it has failed."""

    def wait_published(self, count: int) -> None:
        """Return when `count` steps in all have been published. Raises DeviceError when the device has failed."""

    def wait_for_ranks(self, count: int) -> None:
        """Return when every rank has published `count` steps, where the ring shows them: what the host had written for
        those steps is read no more. Raises DeviceError when a device has failed."""

    def prefill(self, size: int, first: Bucket | None = None, passes: int = 0) -> None:
        """Run the prefill program of so many positions, or of REFRESH, over what the host has written.

        passes  how often the program of PASS runs after it, before that of the first token; what it writes for the
                host is there when this returns
        first  after a prompt's last chunk: a first token's bucket, whose program chooses the first token. It is in the
               ring when this returns, and counts as a step there; the drafts after it may be made later
        """

    def write_state(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write buffers of the state by name, of every rank, after what was started before."""

    def peek(self, buffers: Sequence[torch.Tensor]) -> Callable[[], Sequence[torch.Tensor] | None]:
        """Copy buffers to the host, of several ranks the first one's, as they are after what was started before.

        Returns a function that gives the copies once they are there, None before; nothing waits for them.
        """

    @property
    def mover(self) -> ContentMover:
        """The copies of blocks between the state of all ranks and host memory."""

    @property
    def movers(self) -> Sequence[BlockMover]:
        """The copies of blocks and slots' rows of every rank, in order."""

    def clear_blocks(self, blocks: Sequence[int], pool: str = "") -> None:
        """Zero KV blocks of a pool that a failed request may have filled with NaN."""

    def synchronize(self) -> None:
        """Wait until all that was started is done."""

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
    """An executor whose device repeats steps by itself, publishing each as `step` does."""

    def start_loop(self, bucket: Bucket, budget: int) -> None:
        """Start at most `budget` steps in the bucket, 1 at least; fewer when no slot is active any more.

        The ring must hold all of them. After another loop that is under way, it runs one step at least, even where
        that one ends because no slot is active. No loop may be started after one that was told to stop.
        """

    def stop_loop(self) -> None:
        """Ask the loop to end after the step that runs, or the one after it; returns at once.

        A loop that is queued after it ends after one step.
        """

    def wait_loop(self, count: int) -> bool:
        """Return True when `count` steps in all have been published, False when all loops have ended before.

        Raises DeviceError when the device has failed.
        """


def chosen_body(bucket: Bucket, state: Mapping[str, torch.Tensor], run: Callable[[Bucket], None]) -> Bucket:
    """Run the opening of a step that chooses; returns the body that is chosen.

    state  with `draft_length_choice`
    run    runs a program and waits until the state holds what it wrote
    """
    run(bucket)
    return bodies_of(bucket)[int(state["draft_length_choice"])]
