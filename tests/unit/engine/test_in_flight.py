"""Random launches, publications, cancels, failures and budgets keep what is under way within its bounds."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lowlat.engine.launches.in_flight import MAX_LAUNCHES, Action, InFlight, is_step_certain
from lowlat.errors import DeviceError, LowlatError

NUM_ENTRIES = 16
BUCKETS = st.sampled_from(["narrow", "wide"])


@dataclass
class Launch:
    """A step or a loop on the device, and how many steps it may still run."""

    left: int
    is_loop: bool
    has_run: bool = False


class Driven(RuleBasedStateMachine):
    """A host that asks the state machine, and a device that runs launches in order and fills the ring's entries."""

    def __init__(self) -> None:
        super().__init__()
        self.in_flight = InFlight[str](NUM_ENTRIES)
        self.device: list[Launch] = []
        self.published = self.read = self.launched = 0
        self.has_slots, self.has_failed, self.is_closed = True, False, False

    def run(self) -> None:
        """The device runs one step of its first launch; a loop ends with its last slot, after one step at least."""
        first = self.device[0]
        first.left, first.has_run = first.left - 1, True
        self.published += 1
        assert self.published - self.read <= NUM_ENTRIES, "an entry that was not read is overwritten"
        while self.device and (not self.device[0].left or self.is_over(self.device[0])):
            self.device.pop(0)

    def is_over(self, launch: Launch) -> bool:
        """Whether a loop ends before its budget."""
        return launch.is_loop and launch.has_run and not self.has_slots

    @rule(bucket=BUCKETS, loops=st.booleans(), most=st.none() | st.integers(1, 2 * NUM_ENTRIES))
    def launch(self, bucket: str, loops: bool, most: int | None) -> None:
        """Launch where it is allowed; elsewhere it is refused, and nothing has changed."""
        in_flight, before = self.in_flight, self.in_flight.num_steps
        budget = in_flight.loop_budget(self.in_flight.num_seen - self.read, most) if loops else 0
        refused = in_flight.in_loop and not budget
        if self.has_failed or not in_flight.may_launch(bucket) or refused:
            if not in_flight.may_launch(bucket) or refused:
                with pytest.raises(LowlatError, match="may not follow"):
                    in_flight.launched(bucket, budget)
                assert in_flight.num_steps == before
            return
        if self.in_flight.num_seen - self.read + before >= NUM_ENTRIES:
            return  # the host reads before it launches a step
        self.has_slots = True
        in_flight.launched(bucket, budget)
        self.device.append(Launch(budget or 1, budget > 0))
        self.launched += budget or 1
        assert in_flight.bucket == bucket and in_flight.in_loop == (budget > 0)
        assert in_flight.num_steps == before + (budget or 1)

    @precondition(lambda self: self.device and not self.has_failed)
    @rule(count=st.integers(1, NUM_ENTRIES))
    def publish(self, count: int) -> None:
        for _ in range(count):
            if self.device:
                self.run()

    @rule()
    def cancel(self) -> None:
        """Every slot ends: what loops is over after a step."""
        self.has_slots = False
        while self.device and self.is_over(self.device[0]):
            self.device.pop(0)

    @rule(every=st.booleans())
    def see(self, every: bool) -> None:
        """Wait as the host does: the device publishes what is awaited, or all loops end, or it has failed."""
        in_flight = self.in_flight
        if not in_flight.under_way:
            assert in_flight.awaited(every=every) == in_flight.num_seen
            return
        awaited = in_flight.awaited(every=every)
        assert in_flight.num_seen < awaited <= in_flight.num_seen + in_flight.num_steps
        while not self.has_failed and self.device and self.published < awaited:
            self.run()
        ended = in_flight.in_loop and self.published < awaited
        if self.has_failed and self.published < awaited:
            return  # the wait raises; nothing was seen
        assert ended or self.published >= awaited, "what is awaited was never launched"
        before = in_flight.num_seen
        in_flight.saw(self.published, ended=ended)
        assert before <= in_flight.num_seen == self.published
        assert not (every and in_flight.under_way)

    @rule()
    def read_all(self) -> None:
        """The host makes outputs of the entries that it has seen."""
        self.read = self.in_flight.num_seen

    @rule()
    def stop(self) -> None:
        """A loop is told once, and what is queued after it runs a step."""
        looping = self.in_flight.looping
        assert self.in_flight.stop() == looping
        assert not self.in_flight.looping and not self.in_flight.stop()
        if looping:
            self.cancel()

    @precondition(lambda self: not self.has_failed)
    @rule(more=st.integers(1, 3))
    def publish_nobodys(self, more: int) -> None:
        """Entries of launches that were never made are an error, and are not counted."""
        in_flight = self.in_flight
        seen, steps = in_flight.num_seen, in_flight.num_steps
        for count in (seen + steps + more, seen - more):
            with pytest.raises(DeviceError, match="entries were published"):
                in_flight.saw(count)
        assert (in_flight.num_seen, in_flight.num_steps) == (seen, steps)

    @rule()
    def fail(self) -> None:
        """The device publishes nothing more; what is under way stays so."""
        self.has_failed = True

    @rule()
    def close(self) -> None:
        self.is_closed = True
        looping = self.in_flight.looping
        assert self.in_flight.close() == looping
        if looping:
            self.cancel()

    @invariant()
    def is_bounded(self) -> None:
        """Never more than two launches, nor more steps than were launched or than the ring has entries."""
        in_flight = self.in_flight
        assert in_flight.num_launches <= MAX_LAUNCHES
        assert in_flight.under_way == (in_flight.num_steps > 0) == (in_flight.num_launches > 0)
        assert in_flight.num_seen + in_flight.num_steps <= self.launched
        assert self.published <= in_flight.num_seen + in_flight.num_steps
        assert in_flight.num_seen + in_flight.num_steps - self.read <= NUM_ENTRIES, "an unread entry is overwritten"
        if self.is_closed:
            assert not any(in_flight.may_launch(bucket) for bucket in ("narrow", "wide"))

    def teardown(self) -> None:
        """Whatever came before, a drain at the close leaves nothing under way, unless the device has failed."""
        self.close()
        if not self.has_failed:
            self.read_all()
            self.see(every=True)
            assert not self.in_flight.under_way and not self.device


Driven.TestCase.settings = settings(stateful_step_count=30)
TestInFlight = Driven.TestCase


@pytest.mark.parametrize(
    ("launches", "wanted", "ahead", "action"),
    [
        ([("narrow", 0)], "narrow", True, Action.LAUNCH),
        ([("narrow", 0)], "wide", True, Action.LAUNCH),
        ([("narrow", 0)], None, True, Action.WAIT),
        ([("narrow", 0)], "narrow", False, Action.DRAIN),
        ([("narrow", 0), ("narrow", 0)], "narrow", True, Action.WAIT),
        ([("narrow", 8)], "narrow", True, Action.WAIT),  # its second half is not reached
        ([("narrow", 4)], "narrow", True, Action.LAUNCH),
        ([("narrow", 8)], "wide", True, Action.DRAIN),
        ([("narrow", 8)], None, True, Action.DRAIN),
        ([("narrow", 0), ("narrow", 2)], "narrow", True, Action.WAIT),
    ],
)
def test_what_is_done_next(launches: list[tuple[str, int]], wanted: str | None, ahead: bool, action: Action) -> None:
    in_flight = InFlight[str](NUM_ENTRIES)
    for launch in launches:
        in_flight.launched(*launch)
    assert in_flight.action(wanted, ahead=ahead) is action


def test_a_loop_that_was_told_to_stop_is_followed_by_nothing() -> None:
    in_flight = InFlight[str](NUM_ENTRIES)
    in_flight.launched("narrow", 4)
    assert in_flight.stop()
    assert in_flight.action("narrow", ahead=True) is Action.WAIT
    in_flight.saw(1, ended=True)
    assert not in_flight.under_way and in_flight.may_launch("wide")


def test_a_loop_that_ends_without_a_step_is_an_error() -> None:
    in_flight = InFlight[str](NUM_ENTRIES)
    in_flight.launched("narrow", 4)
    with pytest.raises(DeviceError, match="without a step"):
        in_flight.saw(0, ended=True)


@pytest.mark.parametrize(
    ("num_unread", "most", "budget"), [(0, None, 8), (0, 3, 3), (0, 20, 8), (9, None, 5), (14, None, 0), (20, None, 0)]
)
def test_a_loop_gets_half_of_the_ring_and_no_unread_entry(num_unread: int, most: int | None, budget: int) -> None:
    in_flight = InFlight[str](NUM_ENTRIES)
    in_flight.launched("narrow", 2)
    assert in_flight.loop_budget(num_unread, most) == budget


@pytest.mark.parametrize(
    ("num_remaining", "queued", "wanted"),
    [([5], False, True), ([0], False, False), ([5, 0], False, True), ([5, 0], True, False), ([5, 1], True, True)],
)
def test_a_step_is_wanted_only_for_slots_that_cannot_have_ended(
    num_remaining: list[int], queued: bool, wanted: bool
) -> None:
    assert is_step_certain(num_remaining, queued=queued) == wanted
