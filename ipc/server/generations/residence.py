"""This module knows whether the engine has its device's memory, and who waits for it.

Requests that come while it sleeps wait in their queue and wake it. A server whose device's memory is shared with
others has a keeper, which says when it may wake and when it must sleep; one without wakes at once.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from lowlat.ipc.server.generations.timers import Timer, Timers
from lowlat.ipc.server.threads.events import Command, DecodeResidence, ResidenceAsked, ResidenceDone

__all__ = ["Keeper", "Residence", "State", "Waiting"]

Answer = Callable[[str | None], None]
RETRY_S = 2.0  # for whoever was refused while the engine slept


class State(StrEnum):
    """Where the engine's memory is; "serving" is awake."""

    AWAKE = "serving"
    FALLING = "falling asleep"  # what runs goes on, and nothing more begins
    LEAVING = "leaving"
    ASLEEP = "asleep"
    WAKING = "waking"


class Keeper(Protocol):
    """Shares a device's memory among servers; called in the I/O thread, it may not block."""

    def wanted(self) -> None:
        """A request waits for an engine that sleeps, or whoever may ask for it wants it awake."""

    def told(self, state: State, *, idle: bool, problem: str) -> None:
        """The state has changed, or whether requests are there; problem: why the last order was not obeyed."""


class Waiting(Protocol):
    """The requests of the server."""

    @property
    def num_running(self) -> int:
        """Requests inside the engine."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""

    def admit(self) -> None:
        """Hand over to the engine what may be."""

    def refuse_waiting(self, message: str) -> None:
        """End every request that waits, as one that may be sent again later."""


class Residence:
    """The engine's sleep and wake; used under the I/O thread's lock alone.

    max_wake_s  how long requests wait for an engine that sleeps
    """

    def __init__(
        self,
        requests: Waiting,
        decode: Callable[[Command], None],
        timers: Timers,
        max_wake_s: float,
        keeper: Keeper | None,
    ) -> None:
        self._requests, self._decode, self._timers = requests, decode, timers
        self._max_wake_s, self._keeper = max_wake_s, keeper
        self.state = State.AWAKE
        self._answers: list[tuple[bool, Answer]] = []
        self._patience: Timer | None = None  # of requests that wait for a wake
        self._is_wanted = False
        self._told: tuple[State, bool] = (State.AWAKE, True)
        self._problem = ""

    @property
    def holds(self) -> bool:
        """Whether requests must wait."""
        return self.state is not State.AWAKE

    @property
    def retry_s(self) -> float:
        """The time that a wake adds before a request could be served."""
        return RETRY_S if self.holds else 0.0

    def asked(self, asleep: bool, answer: Answer) -> None:
        """A client wants the engine to sleep or to wake; `answer` is called when it does, or with the problem."""
        if self.state is (State.ASLEEP if asleep else State.AWAKE):
            answer(None)
            return
        self._answers.append((asleep, answer))
        if asleep:
            self._fall()
        elif self.state is State.FALLING:
            self._stay()
        else:
            self._call()

    def ordered(self, event: ResidenceAsked) -> None:
        """The keeper wants the memory back, or gives it."""
        if event.asleep:
            self._fall()
        elif self.state is State.FALLING:
            self._stay()
        elif self.state is State.ASLEEP:
            self._wake()

    def want(self) -> None:
        """A request waits."""
        if self.holds and self._requests.num_waiting:
            self._call()

    def emptied(self) -> None:
        """The engine has no request any more."""
        if self.state is State.FALLING:
            self.state = State.LEAVING
            self._decode(DecodeResidence(True))

    def done(self, event: ResidenceDone) -> None:
        """The engine sleeps, or is awake, or has said why not."""
        self._problem = event.problem
        is_asleep = event.asleep is not bool(event.problem)
        self.state = State.ASLEEP if is_asleep else State.AWAKE
        self._is_wanted = False
        self._answer(event.asleep, event.problem or None)
        if not is_asleep:
            self._stay()
        elif event.problem:
            self._requests.refuse_waiting(event.problem)
            self._calm()
        elif self._requests.num_waiting or self._answers:
            self._call()

    def tell(self, *, idle: bool) -> None:
        """Tell the keeper what has changed since it was told last."""
        if self._keeper is not None and (self._told != (self.state, idle) or self._problem):
            self._told = self.state, idle
            self._keeper.told(self.state, idle=idle, problem=self._problem)
            self._problem = ""

    def _fall(self) -> None:
        if self.state is State.AWAKE:
            self.state = State.FALLING
            if not self._requests.num_running:
                self.emptied()

    def _stay(self) -> None:
        self.state = State.AWAKE
        self._is_wanted = False
        self._calm()
        self._answer(False, None)
        self._answer(True, "it was woken meanwhile")
        self._requests.admit()

    def _call(self) -> None:
        """Have the engine woken, as soon as it sleeps."""
        if self._patience is None:
            self._patience = self._timers.after(self._max_wake_s, self._give_up)
        if self._keeper is not None:
            if not self._is_wanted:
                self._is_wanted = True
                self._keeper.wanted()
        elif self.state is State.ASLEEP:
            self._wake()

    def _wake(self) -> None:
        self.state = State.WAKING
        self._decode(DecodeResidence(False))

    def _give_up(self) -> None:
        self._patience = None
        self._is_wanted = False
        words = f"the model sleeps, and could not be woken within {self._max_wake_s:g} s (max_wake_s)"
        self._requests.refuse_waiting(words)
        self._answer(False, words)

    def _calm(self) -> None:
        if self._patience is not None:
            self._timers.cancel(self._patience)
            self._patience = None

    def _answer(self, asleep: bool, problem: str | None) -> None:
        mine = [answer for wanted, answer in self._answers if wanted is asleep]
        self._answers = [each for each in self._answers if each[0] is not asleep]
        for answer in mine:
            answer(problem)
