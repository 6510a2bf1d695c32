"""This module controls the engine's sleep and wake: whether it holds its device's memory, and who waits for it.

Requests that come while the engine sleeps wait in their queue, and wake it. If servers share a device's memory, a
keeper tells each of them when it may wake and when it must sleep. A server without a keeper wakes its engine at once.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from lowlat.ipc.server.generations.timers import Timer, Timers
from lowlat.ipc.server.threads.events import Command, DecodeResidence, ResidenceAsked, ResidenceDone

__all__ = ["Keeper", "Residence", "State", "Waiting"]

Answer = Callable[[str | None], None]
RETRY_S = 2.0  # added to the retry time of requests refused while the engine sleeps


class State(StrEnum):
    """The state of the engine's memory."""

    AWAKE = "serving"
    FALLING = "falling asleep"  # running requests finish, and no other begins
    LEAVING = "leaving"  # the engine gives its memory back
    ASLEEP = "asleep"
    WAKING = "waking"


class Keeper(Protocol):
    """Shares a device's memory among servers. Its methods are called in the I/O thread and may not block."""

    def wanted(self) -> None:
        """Called when a request waits for an engine that sleeps, or when a client asks to wake it."""

    def told(self, state: State, *, idle: bool, problem: str) -> None:
        """Called when the state or `idle` has changed; problem: why the last order was not obeyed."""


class Waiting(Protocol):
    """The requests of the server."""

    @property
    def num_running(self) -> int:
        """Requests inside the engine."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""

    def admit(self) -> None:
        """Submit waiting requests to the engine, as far as it has slots."""

    def refuse_waiting(self, message: str) -> None:
        """End every waiting request with the code `busy`."""


class Residence:
    """Lets the engine sleep and wakes it; used only under the I/O thread's lock.

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
        self._patience: Timer | None = None  # refuses requests that wait for a wake for too long
        self._is_wanted = False
        self._told: tuple[State, bool] = (State.AWAKE, True)
        self._problem = ""

    @property
    def holds(self) -> bool:
        """Whether requests must wait."""
        return self.state is not State.AWAKE

    @property
    def retry_s(self) -> float:
        """Seconds that a wake adds before a request could be served."""
        return RETRY_S if self.holds else 0.0

    def asked(self, asleep: bool, answer: Answer) -> None:
        """Let the engine sleep, or wake it, for a client; `answer` is called when it is done, or with the problem."""
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
        """Obey the keeper, which wants the memory back, or gives it."""
        if event.asleep:
            self._fall()
        elif self.state is State.FALLING:
            self._stay()
        elif self.state is State.ASLEEP:
            self._wake()

    def want(self) -> None:
        """Wake the engine if requests wait for it."""
        if self.holds and self._requests.num_waiting:
            self._call()

    def emptied(self) -> None:
        """Let the engine sleep if it should: its last request has ended."""
        if self.state is State.FALLING:
            self.state = State.LEAVING
            self._decode(DecodeResidence(True))

    def done(self, event: ResidenceDone) -> None:
        """Handle the engine's answer: it sleeps, is awake, or has a problem."""
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
        """Tell the keeper what has changed since the last call."""
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
        """Wake the engine, or ask the keeper to, as soon as it sleeps."""
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
