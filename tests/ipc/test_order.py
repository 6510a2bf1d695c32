"""SUBMIT, CANCEL, CREDIT, END in any order: a client loses, doubles and reorders nothing, and leaves nothing.

Of the server: test_server_orders.py.
"""

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from scripted_server import Running, expected_tokens, welcome

from lowlat.ipc.client.protocol import ClientProtocol, Stream
from lowlat.ipc.client.request import make_request
from lowlat.ipc.wire import Cancel, Credit, Submit, decode_client, encode, unpack_tokens

WINDOW = 6
places = st.integers(0, 63)


class CoreMachine(RuleBasedStateMachine):
    """The client's core against an honest server, with messages of both directions under way as long as it pleases."""

    def __init__(self) -> None:
        super().__init__()
        self.core = ClientProtocol("ipc:///x", "", WINDOW, 0.0)
        self.core.outgoing.clear()
        self.core.receive(encode(welcome()), 0.0)
        self.to_client: deque[bytes] = deque()
        self.running: dict[int, Running] = {}
        self.streams: list[Stream] = []
        self.wanted: dict[int, tuple[int, ...]] = {}
        self.got: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        self.left: set[int] = set()
        self.cancelled: set[int] = set()

    @rule(length=st.integers(1, 40))
    def submit(self, length: int) -> None:
        prompt = (len(self.streams), length)
        stream = self.core.submit(make_request(prompt, {"max_tokens": length}))
        self.streams.append(stream)
        self.wanted[stream.number] = expected_tokens(prompt, length)
        self.got[stream.number] = []

    @precondition(lambda self: self.streams)
    @rule(place=places)
    def cancel(self, place: int) -> None:
        stream = self.streams[place % len(self.streams)]
        self.core.cancel(stream.number)
        self.cancelled.add(stream.number)

    @precondition(lambda self: self.streams)
    @rule(place=places)
    def abandon(self, place: int) -> None:
        stream = self.streams[place % len(self.streams)]
        self.core.abandon(stream.number)
        self.left.add(stream.number)

    @rule(count=st.integers(1, 8), per_chunk=st.integers(1, 4))
    def server_takes(self, count: int, per_chunk: int) -> None:
        while count and self.core.outgoing:
            count -= 1
            message, body = decode_client(self.core.outgoing.popleft())
            if isinstance(message, Submit):
                ids = expected_tokens(unpack_tokens(body), message.sampling.token_limit)
                found = self.running[message.number] = Running(b"", message, ids, message.credit)
            else:
                assert isinstance(message, Cancel | Credit)
                found = self.running[message.number]
                if found.over:
                    continue  # the two crossed
                if isinstance(message, Credit):
                    found.credit += message.tokens
                else:
                    found.cancelled = True
            self.to_client.extend(found.next_messages(per_chunk))

    @rule(count=st.integers(1, 8))
    def client_takes(self, count: int) -> None:
        while count and self.to_client:
            count -= 1
            self.core.receive(self.to_client.popleft(), 0.0)

    @precondition(lambda self: self.streams)
    @rule(place=places, count=st.integers(1, 10))
    def read(self, place: int, count: int) -> None:
        stream = self.streams[place % len(self.streams)]
        while count and stream.ready and stream.number not in self.left:
            count -= 1
            chunk = self.core.take(stream)
            if chunk is None:
                break
            self.got[stream.number] += chunk.token_ids
            if chunk.finish_reason is not None:
                self.reasons[stream.number] = chunk.finish_reason

    @invariant()
    def tokens_are_a_prefix(self) -> None:
        for number, got in self.got.items():
            assert tuple(got) == self.wanted[number][: len(got)]

    @invariant()
    def unread_tokens_are_bounded(self) -> None:
        for stream in self.streams:
            assert sum(len(chunk.token_ids) for chunk in stream.chunks) < WINDOW + 4

    def teardown(self) -> None:
        for _ in range(2000):
            if self.core.num_streams == 0 and not self.core.outgoing and not self.to_client:
                break
            self.server_takes(8, 3)
            self.client_takes(8)
            for place in range(len(self.streams)):
                self.read(place, 8)
        for place, stream in enumerate(self.streams):
            self.read(place, 1000)
            if stream.number in self.left:
                continue
            if self.reasons[stream.number] == "length":
                assert tuple(self.got[stream.number]) == self.wanted[stream.number]
            else:
                assert stream.number in self.cancelled
        assert self.core.num_streams == 0
        assert self.core.failure is None


def test_any_order_against_the_core() -> None:
    run_state_machine_as_test(CoreMachine, settings=settings(stateful_step_count=40))
