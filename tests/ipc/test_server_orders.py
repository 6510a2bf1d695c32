"""Any order of SUBMIT, CANCEL, CREDIT, steps, text, deaths: every request ends once, nothing is lost or left."""

import logging
from typing import Any

from fake_engine import FakeEngine, expected_tokens
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from msgspec import Struct

from lowlat.errors import RequestError
from lowlat.ipc.limits import Limits
from lowlat.ipc.server.admission import User
from lowlat.ipc.server.generations.prepare import prepare
from lowlat.ipc.server.generations.requests import Requests
from lowlat.ipc.server.generations.statistics import Statistics
from lowlat.ipc.server.generations.timers import Timers
from lowlat.ipc.server.peer import Peer
from lowlat.ipc.server.threads.events import Command, DecodeCancel, DecodeSubmit, Prepare, Prepared, Refused, Step
from lowlat.ipc.server.threads.watchdog import StepClock
from lowlat.ipc.wire import End, Error, Sampling, Submit, Tokens, pack_tokens, unpack_tokens

LIMITS = Limits(max_queue=3, max_requests_per_client=4, max_credit=50)


class _Peers:
    """Peers whose queues never fill: what is sent is kept, by peer."""

    def __init__(self) -> None:
        self.all: list[Peer] = []
        self.sent: dict[Peer, list[Struct]] = {}
        self.num_greeted = 0

    def tell(self, listener: Requests) -> None:
        """Nobody goes or is blocked but by the rules."""

    def __iter__(self) -> Any:
        return iter(list(self.all))

    def send(self, peer: Peer, message: Struct) -> bool:
        if peer.gone:
            return False
        self.sent[peer].append(message)
        return True


class _TextThreads:
    def __init__(self) -> None:
        self.jobs: list[Prepare] = []

    def put(self, job: Prepare) -> None:
        self.jobs.append(job)


class Orders(RuleBasedStateMachine):
    """The I/O thread's part, with the other threads' parts as rules that may come whenever they like."""

    peers = Bundle("peers")

    def __init__(self) -> None:
        super().__init__()
        self.engine = FakeEngine(tokens_per_step=2, max_running=2)
        self.commands: list[Command] = []
        self.text = _TextThreads()
        self.taken: list[Prepared] = []  # what the text thread is about to hand back
        self.table = _Peers()
        self.requests = Requests(
            self.engine,
            None,
            LIMITS,
            Timers(),
            Statistics(),
            StepClock(LIMITS),
            self.table,  # type: ignore[arg-type]
            logging.getLogger("test"),
            epoch="0123456789abcdef",
            decode=self.commands.append,
            text_threads=self.text,  # type: ignore[arg-type]
            shared=True,
        )
        self.asked: dict[tuple[Peer, int], tuple[tuple[int, ...], int]] = {}
        self.granted: dict[tuple[Peer, int], int] = {}

    @rule(target=peers, uid=st.integers(0, 2))
    def connect(self, uid: int) -> Peer:
        peer = Peer(bytes(5), 0, User(uid=uid))
        self.table.all.append(peer)
        self.table.sent[peer] = []
        return peer

    @rule(
        peer=peers,
        credit=st.integers(1, 60),
        max_tokens=st.integers(1, 9),
        long=st.booleans(),
        first=st.integers(0, 1001),
    )
    def submit(self, peer: Peer, credit: int, max_tokens: int, long: bool, first: int) -> None:
        if peer.gone:
            return
        peer.last_number += 1
        prompt = (first,) * (300 if long else 1)
        key = (peer, peer.last_number)
        self.asked[key] = (prompt, max_tokens)
        self.granted[key] = credit
        submit = Submit(peer.last_number, credit, Sampling(max_tokens=max_tokens))
        self.requests.submit(peer, submit, pack_tokens(prompt), 100 + 4 * len(prompt))

    @rule(peer=peers, which=st.integers(0, 100))
    def cancel(self, peer: Peer, which: int) -> None:
        if peer.streams:
            self.requests.cancel(list(peer.streams.values())[which % len(peer.streams)])

    @rule(peer=peers, which=st.integers(0, 100), tokens=st.integers(1, 20))
    def credit(self, peer: Peer, which: int, tokens: int) -> None:
        if peer.streams:
            stream = list(peer.streams.values())[which % len(peer.streams)]
            self.granted[peer, stream.number] += tokens
            self.requests.credit(stream, tokens)

    @rule(peer=consumes(peers))
    def die(self, peer: Peer) -> None:
        peer.gone = True
        self.table.all.remove(peer)
        self.requests.peer_gone(peer)

    @rule()
    def text_thread_takes(self) -> None:
        if self.text.jobs:
            stream, submit, body = self.text.jobs.pop(0).take()
            assert (submit is None) == stream.over
            if submit is not None:
                prepared = prepare(stream, submit, body, self.engine, None, logging.getLogger("test"), 4096)
                assert prepared is not None
                self.taken.append(prepared)

    @rule()
    def text_thread_hands_back(self) -> None:
        if self.taken:
            self.requests.prepared(self.taken.pop(0))

    @rule()
    def command(self) -> None:
        """The decode thread obeys one command."""
        if not self.commands:
            return
        command = self.commands.pop(0)
        if isinstance(command, DecodeSubmit):
            try:
                self.engine.submit(command.request_id, command.prompt, command.sampling, command.cache_salt)
            except RequestError as error:
                self.requests.refused(Refused(command.request_id, "invalid", str(error)))
        elif isinstance(command, DecodeCancel):
            try:
                self.engine.cancel(command.request_id)
            except RequestError:
                return

    @rule(num_steps=st.integers(1, 3))
    def step(self, num_steps: int) -> None:
        """Some steps, which the I/O thread sees together."""
        for _ in range(num_steps):
            outputs = self.engine.step()
            ended = [one.request_id for one in outputs if one.finish_reason is not None]
            self.requests.step(Step(outputs, {name: self.engine.metrics(name) for name in ended}))
        self.requests.flush()

    @invariant()
    def bounds_hold(self) -> None:
        requests = self.requests
        assert requests.num_running <= 2
        assert requests.num_running + requests.num_waiting <= 2 + LIMITS.max_queue
        assert requests.idle == (not any(peer.streams for peer in self.table.all))
        for peer in self.table.all:
            assert len(peer.streams) <= LIMITS.max_requests_per_client
            assert all(not stream.over for stream in peer.streams.values())

    @invariant()
    def what_was_sent_is_sound(self) -> None:
        for name, messages in self.table.sent.items():
            tokens: dict[int, tuple[int, ...]] = {}
            sequences: dict[int, int] = {}
            ended: set[int] = set()
            for message in messages:
                number = message.number  # type: ignore[attr-defined]
                assert number not in ended
                prompt, max_tokens = self.asked[name, number]
                if isinstance(message, Error):
                    assert number not in tokens
                    ended.add(number)
                    continue
                assert isinstance(message, Tokens | End)
                assert message.sequence == sequences.get(number, 0)
                sequences[number] = message.sequence + 1
                if isinstance(message, Tokens):
                    tokens[number] = tokens.get(number, ()) + unpack_tokens(message.token_ids)
                    assert len(tokens[number]) <= self.granted[name, number] + 1  # overdrawn by less than a step
                    expected = expected_tokens(prompt, max_tokens)
                    assert tokens[number] == expected[: len(tokens[number])]
                else:
                    ended.add(number)
                    assert message.num_tokens == len(tokens.get(number, ()))
                    if message.finish_reason == "length":
                        assert message.num_tokens == max_tokens

    def teardown(self) -> None:
        """With credit and time everything ends, and nothing is left."""
        for _ in range(100):
            for peer in self.table.all:
                for stream in list(peer.streams.values()):
                    self.granted[peer, stream.number] += 50
                    self.requests.credit(stream, 50)
            self.text_thread_takes()
            self.text_thread_hands_back()
            while self.commands:
                self.command()
            self.step(1)
        self.what_was_sent_is_sound()
        requests, shares = self.requests, self.requests._shares
        assert requests.idle
        assert (requests.num_running, requests.num_waiting, shares.num_prompt_bytes) == (0, 0, 0)
        assert not (shares.inside or shares.live or shares._bytes)
        assert not self.engine.busy
        ended = {
            (name, message.number)
            for name, messages in self.table.sent.items()
            for message in messages
            if isinstance(message, End | Error)
        }
        alive = set(self.table.all)
        assert {key for key in self.asked if key[0] in alive} <= ended


TestOrders = Orders.TestCase
TestOrders.settings = settings(stateful_step_count=40)
