"""This module has a fake device that works later: the reference executor behind a queue, with device loops.

It does its work when the host waits for it, or at random before. It checks the rules of a runtime: no entry of the ring
is overwritten before it was read, prefill starts when nothing else is under way, and after a loop that was not told to
stop only another loop is queued.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lowlat import Runtime, RuntimeConfig, SpeculativeConfig
from lowlat.engine.loading.loading import load
from lowlat.errors import DeviceError
from lowlat.executors import OpHook, chosen_body
from lowlat.executors.block_moves import BlockMover, ContentMover
from lowlat.executors.reference import ReferenceExecutor
from lowlat.graphs import Bucket, BufferSet
from lowlat.graphs.program import Program, Stage
from lowlat.kernels.reference.step.publish import SLOT
from lowlat.kernels.reference.step.slot_record import HAS_GRAMMAR
from lowlat.kernels.reference.step.slots import CANCEL
from lowlat.step.variants import is_choice


@dataclass
class _Work:
    """A step, or a loop of so many more; next, copies between its buffers and the host that nothing waits for."""

    bucket: Bucket
    left: int | None = None
    copies: list[Callable[[], None]] = field(default_factory=list)


class FakeDevice:
    """An executor, see `lowlat.executors`; `log` has its orders and its work, in order.

    lead     the most steps that a loop runs, each time the host looks, before the host has asked for them
    fail_at  the step that fails, counted from 0
    """

    name = "fake"
    asynchronous = True

    def __init__(self, inner: Any, *, seed: int = 0, lead: int = 0, fail_at: int | None = None) -> None:
        assert isinstance(inner, ReferenceExecutor)
        self.inner, self.device, self.state = inner, inner.device, inner.state
        self.residence = inner.residence
        self.counts = inner.counts
        self.lead, self.fail_at = lead, fail_at
        self.log: list[tuple[Any, ...]] = []
        self.num_read: Callable[[], int] = lambda: 0
        self.published: list[list[int]] = []  # the slots of each entry
        self.first_tokens: set[int] = set()  # the entries that no step has made
        self.last_ones: list[int] = []  # the entries after which nothing had been launched when they were published
        self._random = random.Random(seed)
        self._queue: list[_Work] = []
        self._stop = False
        self._begun = False  # the first step of the queue has told its rows
        self._body = Bucket(1, 1, 0)  # its bucket, where it chooses its width the one that it chose
        self._rest: tuple[Any, ...] = ()  # what it has left to do

    @property
    def idle(self) -> bool:
        """Whether all work is done."""
        return not self._queue

    @property
    def _looping(self) -> bool:
        return any(work.left is not None for work in self._queue)

    @property
    def mover(self) -> ContentMover:
        """The inner executor's."""
        return self.inner.mover

    @property
    def movers(self) -> Sequence[BlockMover]:
        """The inner executor's."""
        return self.inner.movers

    @property
    def head(self) -> int:
        """Steps done."""
        return int(self.state["ring_head"])

    def _run(self, bucket: Bucket) -> None:
        self._begin(bucket)
        self._publish(self._finish)
        self.log.append(("ran", bucket))

    def _begin(self, bucket: Bucket) -> None:
        """Run the stage that tells the rows, once."""
        if self._begun:
            return
        with torch.inference_mode():
            if is_choice(bucket):
                bucket = chosen_body(bucket, self.state, lambda part: self.inner._run(self.inner._prepare(part)[1]))
            bound = self.inner._prepare(bucket)[1]
            listing = (place for place, each in enumerate(bound) if each[0].stage is Stage.ACTIVE_SLOTS)
            count = 1 + max(listing, default=-1)
            self._begun, self._body, self._rest = True, bucket, bound[count:]
            self.inner._run(bound[:count])

    def _finish(self) -> None:
        self._begun = False
        with torch.inference_mode():
            self.inner._run(self._rest)

    def _waits_to_begin(self, bucket: Bucket) -> bool:
        """Whether a step waits for what the grammar of a slot forces; it looks before it takes commands, and after."""
        if self._begun or bucket.rows == 1:
            return False
        ring, (head,), (tail,) = (self.state[f"command_{part}"].tolist() for part in ("ring", "head", "tail"))
        commands = [ring[number % len(ring)] for number in range(head, tail)]
        cancelled = {slot for opcode, slot, _, _ in commands if opcode == CANCEL}
        active = self.state["active"].nonzero().flatten().tolist()
        listed = {*active[: bucket.batch], *[slot for slot in active if slot not in cancelled][: bucket.batch]}
        guided = [slot for slot in listed if self.state["slot_ints"][slot, HAS_GRAMMAR]]
        return any(self.state["grammar_decided"][slot] < self.state["lengths"][slot] for slot in guided)

    def _waits(self, bucket: Bucket) -> bool:
        """Whether a step waits for the host: to begin, or with the draw of a slot after that."""
        if self._waits_to_begin(bucket):
            return True
        self._begin(bucket)
        listed = {**self.inner.scratch(self._body), **self.state}
        (published,) = (op for op in self.inner.program(self._body).ops if op.kind == "publish")
        slots = [slot for slot in listed[published.reads["slots"]].tolist() if slot >= 0]
        guided = [slot for slot in slots if self.state["slot_ints"][slot, HAS_GRAMMAR] == 1]
        return any(self.state["grammar_ready"][slot] < self.state["lengths"][slot] for slot in guided)

    def _publish(self, run: Callable[[], None]) -> None:
        """Run what publishes an entry."""
        if self.head == self.fail_at:
            raise DeviceError("the device failed")
        entry = self.head
        run()
        records = self.state["ring_records"]
        assert self.head - self.num_read() <= records.shape[0], "an entry was written over before it was read"
        slots = records[entry % records.shape[0], :, SLOT].tolist()
        self.published.append([slot for slot in slots if slot >= 0])

    def _work(self) -> None:
        """Run the step that is due, if there is one; a loop looks at the flag before its entry is published."""
        if not self._queue or self._waits(self._queue[0].bucket):
            return
        work = self._queue.pop(0)
        if not self._queue and work.left in (None, 1):
            self.last_ones.append(self.head)
        stop = self._stop
        self._run(work.bucket)
        if work.left is not None and work.left > 1 and not stop and int(self.state["active"].sum()):
            work.left -= 1
            self._queue.insert(0, work)
            return
        for copy in work.copies:
            copy()

    def _then(self, copy: Callable[[], None]) -> None:
        """Make a copy after what was started before."""
        if self.idle:
            copy()
        else:
            self._queue[-1].copies.append(copy)

    def _hurry(self) -> None:
        for _ in range(self._random.randint(0, self.lead)):
            self._work()

    def wait_until(self, seen: Callable[[], bool]) -> None:
        if not seen():
            bucket = self._queue[0].bucket
            assert not self._waits_to_begin(bucket), "the host waits for rows that wait for what is forced"
            self._begin(bucket)
        assert seen(), "the host waits for what no step tells"

    def step(self, bucket: Bucket, meanwhile: Callable[[], None] | None = None) -> None:
        assert not self._looping and meanwhile is None
        self.log.append(("step", bucket))
        self._queue.append(_Work(bucket))
        self._hurry()

    def start_loop(self, bucket: Bucket, budget: int) -> None:
        assert not self._looping or not self._stop
        assert budget >= 1
        self.log.append(("loop", bucket, budget))
        self._queue.append(_Work(bucket, budget))
        self._stop = False
        self._hurry()

    def stop_loop(self) -> None:
        self.log.append(("stop",))
        self._stop = True

    def wait_published(self, count: int) -> None:
        while self.head < count:
            if self.idle:
                raise DeviceError(f"the device is idle and has published {self.head} of {count} steps")
            assert not self._waits(self._queue[0].bucket), "the host waits for a step that waits for it"
            self._work()

    def wait_for_ranks(self, count: int) -> None:
        assert self.head >= count, "the ring shows more steps than were published"
        self.inner.wait_for_ranks(count)

    def wait_loop(self, count: int) -> bool:
        while self.head < count and not self.idle:
            self._work()
        self._hurry()
        return self.head >= count

    def prefill(self, size: int, first: Bucket | None = None, passes: int = 0) -> None:
        assert self.idle
        self.log.append(("prefill",))
        if first is None:
            self.inner.prefill(size, None, passes)
        else:
            self.first_tokens.add(self.head)
            self._publish(lambda: self.inner.prefill(size, first, passes))

    def write_state(self, values: Mapping[str, torch.Tensor]) -> None:
        sent = {name: value.clone() for name, value in values.items()}
        self._then(lambda: self.inner.write_state(sent))

    def peek(self, buffers: Sequence[torch.Tensor]) -> Callable[[], Sequence[torch.Tensor] | None]:
        found: list[Sequence[torch.Tensor] | None] = []
        self._then(lambda: found.append(self.inner.peek(buffers)()))
        return lambda: found[0] if found else None

    def clear_blocks(self, blocks: Sequence[int], pool: str = "") -> None:
        self.synchronize()
        self.log.append(("clear", *blocks))
        self.inner.clear_blocks(blocks, pool)

    def synchronize(self) -> None:
        while not self.idle:
            assert not self._waits(self._queue[0].bucket), "the host waits for a step that waits for it"
            self._work()

    def scratch(self, bucket: Bucket) -> BufferSet:
        return self.inner.scratch(bucket)

    def program(self, bucket: Bucket) -> Program:
        return self.inner.program(bucket)

    def set_hook(self, hook: OpHook | None) -> None:
        self.inner.set_hook(hook)

    def close(self) -> None:
        self.log.append(("close",))
        self.inner.close()

    def count(self, kind: str) -> int:
        """How often something stands in the log."""
        return sum(entry[0] == kind for entry in self.log)


def load_fake(
    target: Path,
    speculative: SpeculativeConfig | None,
    *,
    device_loop: bool,
    seed: int = 0,
    lead: int = 0,
    fail_at: int | None = None,
    **options: Any,
) -> tuple[Runtime, FakeDevice]:
    """Load a runtime on a fake device; returns both."""
    config = RuntimeConfig(device="cpu", **options)
    loaded = load(target, speculative, config)
    device = FakeDevice(loaded.executor, seed=seed, lead=lead, fail_at=fail_at)
    runtime = Runtime(replace(loaded, executor=device), replace(config, device_loop=device_loop))
    mailbox = runtime._steps.mailbox
    device.num_read = lambda: mailbox.num_seen - mailbox.num_unread
    assert isinstance(device.state["ring_head"], torch.Tensor)
    return runtime, device
