"""The supervisor runs one process for each model, restarts a process that ends, and shares the devices' memory.

It loads no model itself. A process asks it for memory before it loads, and reports when a request waits for its
sleeping model. The supervisor then puts other models to sleep, as `lowlat.serving.models.places` decides.
"""

import fcntl
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lowlat.errors import ConfigError
from lowlat.ipc.endpoint import make_folder
from lowlat.ipc.signals import ending_signals
from lowlat.serving.models.channel import Channel
from lowlat.serving.models.places import Decision, Place, Presence, decide
from lowlat.serving.models.roster import Listed, Roster, roster_path
from lowlat.serving.models.tables import ModelTable

__all__ = ["Supervisor"]

logger = logging.getLogger("lowlat.serving.models")

GIB = 1 << 30
CONTEXT_BYTES = 768 << 20  # a process's context, kernels and libraries on a GPU, besides its planned memory
FIRST_BACKOFF_S, LAST_BACKOFF_S = 1.0, 60.0
WELL_S = 60.0  # after serving for this time, a process restarts with the first backoff
TICK_S = 0.2
END_S = 5.0  # from the end of a process's channel until it is killed
STATES = {
    "AWAKE": Presence.AWAKE,
    "FALLING": Presence.FALLING,
    "LEAVING": Presence.FALLING,
    "ASLEEP": Presence.ASLEEP,
    "WAKING": Presence.WAKING,
}


class Child:
    """One model's process, and its place in memory."""

    def __init__(self, table: ModelTable) -> None:
        self.table = table
        self.place = Place(table.name, can_sleep=bool(table.given().get("can_sleep")))
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: Channel | None = None
        self.problem: str | None = None
        self.for_good = False
        self.facts: dict[str, Any] = {}
        self.ready_at = 0.0
        self.ended_at: float | None = None  # when its channel ended
        self.start_at: float | None = 0.0
        self.backoff_s = FIRST_BACKOFF_S

    def listed(self) -> Listed:
        """Return its entry of the roster."""
        pid = None if self.process is None else self.process.pid
        return Listed(self.table.name, self.table.endpoint, str(self.place.presence), self.problem, pid)

    def order(self, what: str, **more: Any) -> None:
        """Send an order to the process."""
        if self.channel is not None:
            self.channel.send({"order": what, **more})


class Supervisor:
    """Runs the processes of several models until a signal ends them.

    models_gib  GiB of each device that all models together may hold; None: what the first one finds free
    busy_s      see `lowlat.serving.models.places.decide`
    drain_s     seconds that a process has to finish its requests at the end
    """

    def __init__(
        self,
        tables: Sequence[ModelTable],
        endpoint: str,
        *,
        models_gib: float | None,
        busy_s: float,
        drain_s: float,
    ) -> None:
        path = roster_path(endpoint)
        if path is None:
            raise ConfigError(f"[[models]] listen at ipc://, and endpoint is {endpoint!r:.200}")
        self.roster = path
        self._models_gib, self._busy_s, self._drain_s = models_gib, busy_s, drain_s
        self._children = {table.name: Child(table) for table in tables}
        self._budgets: dict[str, int] = {}
        self._selector = selectors.DefaultSelector()
        self._listed: tuple[Listed, ...] = ()
        self._num_signals = 0
        self._has_warned = False

    @property
    def listed(self) -> tuple[Listed, ...]:
        """The models, in order."""
        return tuple(child.listed() for child in self._children.values())

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return the facts that each loaded model has reported, by name."""
        return {name: child.facts for name, child in self._children.items() if child.facts}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Handle signals while the context lasts; at its end, end all processes and remove the roster."""
        make_folder(self.roster.parent)
        lock = self._locked()
        before = {number: signal.signal(number, self._signalled) for number in ending_signals()}
        self._write()
        try:
            yield
        finally:
            self._end_all()
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
            self.roster.unlink(missing_ok=True)
            os.close(lock)

    def _locked(self) -> int:
        """Take the roster's lock; returns its open descriptor. Raises ConfigError if another server holds the lock."""
        path = self.roster.with_suffix(".lock")
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise ConfigError(f"another server of [[models]] runs at this endpoint already ({path})") from error
        return lock

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run until `until()` is true or a signal comes. Raises ConfigError if no model can be served."""
        while not until() and not self._num_signals:
            self._turn(TICK_S)
            if all(child.place.presence is Presence.FAILED for child in self._children.values()):
                raise ConfigError(next(child.problem or "" for child in self._children.values()))

    @property
    def is_ready(self) -> bool:
        """Whether any model answers requests."""
        return any(child.listed().answers for child in self._children.values())

    def _turn(self, timeout_s: float) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if child.process is None and child.start_at is not None and now >= child.start_at and not self._num_signals:
                self._start(child)
        for key, _ in self._selector.select(timeout_s):
            child = key.data
            for message in child.channel.receive():
                self._heard(child, message)
            if child.channel.closed:
                self._selector.unregister(child.channel)
                child.channel.close()
                child.channel, child.ended_at = None, time.monotonic()
        for child in self._children.values():
            self._reap(child)
        if not self._num_signals:
            self._settle()
        self._write()

    def _start(self, child: Child) -> None:
        own, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "lowlat.cli", "serve", f"--supervised={theirs.fileno()}"]
        environment = {name: value for name, value in os.environ.items() if name != "LOWLAT_API_KEY"}
        with theirs:
            # in a session of its own, it gets no Ctrl-C: the supervisor gets it, and lets running requests finish
            child.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
                start_new_session=True, env=environment,
            )  # fmt: skip
        child.channel, child.start_at, child.ended_at = Channel(own), None, None
        child.place.presence, child.place.wanted_since, child.place.idle = Presence.STARTING, None, True
        self._selector.register(child.channel, selectors.EVENT_READ, child)
        child.channel.send({"settings": child.table.given()})
        logger.info("%s starts", child.table.name, extra={"server_pid": child.process.pid})

    def _heard(self, child: Child, message: dict[str, Any]) -> None:
        place, now, event = child.place, time.monotonic(), message["event"]
        if event == "need":
            place.awake = {device: size + _context_bytes(device) for device, size, _ in message["devices"]}
            place.asleep, place.wanted_since = dict(place.awake), now
            for device, _, free in message["devices"]:
                if self._models_gib is not None:
                    self._budgets[device] = int(self._models_gib * GIB)
                else:
                    self._budgets.setdefault(device, 1 << 62 if free is None else free)
        elif event == "ready":
            child.facts, child.problem, child.ready_at = message["facts"], None, now
            place.presence, place.wanted_since, place.last_used = Presence.AWAKE, None, now
            leaves = child.facts["sleep_bytes"]
            place.asleep = {device: max(0, size - leaves.get(device, 0)) for device, size in place.awake.items()}
            logger.info("%s is ready", place.name)
        elif event == "wanted":
            place.wanted_since = place.wanted_since or now
        elif event == "state":
            self._told(child, message, now)
        elif event == "failed":
            child.problem, child.for_good = message["problem"], message["for_good"]

    def _told(self, child: Child, message: dict[str, Any], now: float) -> None:
        place = child.place
        presence = STATES[message["state"]]
        if presence is not place.presence:
            logger.info("%s is %s", place.name, presence)
        place.presence = presence
        if not (place.idle and message["idle"]):
            place.last_used = now
        place.idle = message["idle"]
        if presence is Presence.AWAKE or message["problem"]:
            place.wanted_since = None
        if message["problem"]:
            logger.warning("%s: %s", place.name, message["problem"])

    def _reap(self, child: Child) -> None:
        """Handle the end of a process, and schedule its restart."""
        process, place, now = child.process, child.place, time.monotonic()
        if process is None or (code := process.poll()) is None:
            if process is not None and child.ended_at is not None and now > child.ended_at + END_S:
                process.kill()
            return
        if child.channel is not None:
            for message in child.channel.receive() if self._is_readable(child.channel) else ():
                self._heard(child, message)
            self._selector.unregister(child.channel)
            child.channel.close()
            child.channel = None
        child.process, place.wanted_since = None, None
        if self._num_signals:
            place.presence = Presence.DOWN
            return
        if child.ready_at and now - child.ready_at > WELL_S:
            child.backoff_s = FIRST_BACKOFF_S
        child.problem = child.problem or f"its process ended with code {code}"
        if child.for_good:
            place.presence = Presence.FAILED
            logger.error("%s cannot be served: %s", place.name, child.problem)
            return
        place.presence, child.start_at, child.ready_at = Presence.DOWN, now + child.backoff_s, 0.0
        logger.error("%s: %s; it starts again in %.0f s", place.name, child.problem, child.backoff_s)
        child.backoff_s = min(LAST_BACKOFF_S, 2 * child.backoff_s)

    @staticmethod
    def _is_readable(channel: Channel) -> bool:
        with selectors.DefaultSelector() as one:
            one.register(channel, selectors.EVENT_READ)
            return bool(one.select(0))

    def _settle(self) -> None:
        """Decide which models wake, load or go to sleep, and send the orders."""
        places = [child.place for child in self._children.values()]
        decision: Decision = decide(places, self._budgets, time.monotonic(), self._busy_s)
        for name in decision.sleeps:
            child = self._children[name]
            child.place.presence = Presence.FALLING
            child.order("sleep")
        for name in decision.grants:
            child = self._children[name]
            loads = child.place.presence is Presence.STARTING
            child.place.presence = Presence.LOADING if loads else Presence.WAKING
            child.place.wanted_since = None
            child.order("load" if loads else "wake")
        for name, problem in decision.refusals.items():
            child = self._children[name]
            if child.place.presence is Presence.STARTING:
                child.order("refuse", problem=problem)
            else:
                logger.warning("%s cannot be woken: %s", name, problem)
            child.place.wanted_since = None

    def _write(self) -> None:
        listed = self.listed
        if listed != self._listed:
            try:
                Roster(os.getpid(), listed).write(self.roster)
            except OSError as error:  # a full disk: models keep running, and the next turn tries again
                if not self._has_warned:
                    logger.warning("the models' states cannot be written to %s: %s", self.roster, error.strerror)
                self._has_warned = True
            else:
                self._listed, self._has_warned = listed, False

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1

    def _end_all(self) -> None:
        """End every process: by its own drain, at once after a second signal, and by SIGKILL after the deadline."""
        told, deadline = 0, time.monotonic() + self._drain_s + END_S
        self._num_signals = max(1, self._num_signals)
        while any(child.process is not None for child in self._children.values()):
            if told < min(2, self._num_signals):
                told += 1
                for child in self._children.values():
                    if child.process is not None:
                        child.process.terminate()
            if time.monotonic() > deadline:
                for child in self._children.values():
                    if child.process is not None:
                        child.process.kill()
            self._turn(TICK_S)


def _context_bytes(device: str) -> int:
    """Return the bytes of a device that a process takes besides its planned memory."""
    return CONTEXT_BYTES if device.startswith("cuda") else 0
