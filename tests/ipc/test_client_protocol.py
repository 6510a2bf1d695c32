"""The client's core without sockets: gaps, credit, ends, errors, heartbeats, goodbyes."""

from typing import Any

import msgspec
import numpy as np
import pytest
from scripted_server import LIMITS, welcome

from lowlat.errors import Busy, ConfigError, LowlatError, RequestError, ServerGone, StreamError
from lowlat.ipc.client.protocol import HEARTBEAT_INTERVAL_S, SILENCE_S, ClientProtocol, Reply, Stream
from lowlat.ipc.client.request import make_request, pieces_of
from lowlat.ipc.wire import (
    Bye,
    Cancel,
    Credit,
    Drain,
    End,
    Error,
    Health,
    Hello,
    Pong,
    Stats,
    StatsReply,
    Submit,
    Tokens,
    decode_client,
    encode,
    pack_tokens,
)


def sent(connection: ClientProtocol) -> list[msgspec.Struct]:
    """Take what is to be sent, decoded as a server would."""
    messages = [decode_client(frames)[0] for frames in connection.outgoing]
    connection.outgoing.clear()
    return messages


def connected(window: int = 8, **changes: Any) -> ClientProtocol:
    connection = ClientProtocol("ipc:///x", "test", window, 0.0)
    assert isinstance(sent(connection)[0], Hello)
    assert connection.receive(encode(welcome(**changes)), 0.0) is connection.greeting
    return connection


def submitted(connection: ClientProtocol) -> Stream:
    stream = connection.submit(make_request([1, 2], {"max_tokens": 100}))
    (submit,) = sent(connection)
    assert isinstance(submit, Submit)
    assert (submit.number, submit.credit) == (stream.number, stream.window)
    return stream


def tokens(stream: Stream, sequence: int, *ids: int, text: str | None = None) -> bytes:
    return encode(Tokens(stream.number, sequence, pack_tokens(ids), text))


def test_chunks_come_in_order_and_the_end_after_them() -> None:
    connection = connected()
    stream = submitted(connection)
    assert connection.receive(tokens(stream, 0, 5, text="a"), 0.0) is stream
    connection.receive(tokens(stream, 1, 6, 7, text="bc"), 0.0)
    connection.receive(encode(End(stream.number, 2, 3, "stop", 7, metrics={"m": 1})), 0.0)
    chunks = [connection.take(stream) for _ in range(3)]
    assert [chunk.token_ids for chunk in chunks if chunk] == [(5,), (6, 7), ()]
    last = chunks[-1]
    assert last is not None
    assert (last.finish_reason, last.stop_reason, last.metrics) == ("stop", 7, {"m": 1})
    assert connection.take(stream) is None
    assert connection.num_streams == 0


@pytest.mark.parametrize("sequence", [0, 2, 5])
def test_a_gap_or_a_repeat_breaks_the_stream_and_says_what_is_lost(sequence: int) -> None:
    connection = connected()
    stream, other = submitted(connection), submitted(connection)
    connection.receive(tokens(stream, 0, 5, text="a"), 0.0)
    connection.receive(tokens(stream, sequence, 6), 0.0)
    assert connection.take(stream) is not None  # what came before is still given
    with pytest.raises(StreamError, match=f"message 1 should have come and message {sequence} did") as caught:
        connection.take(stream)
    assert (caught.value.token_ids, caught.value.text, caught.value.code) == ((5,), "a", "lost")
    assert sent(connection) == [Cancel(stream.number)]
    connection.receive(tokens(other, 0, 9), 0.0)
    assert connection.take(other) is not None  # others are unaffected


def test_an_end_that_counts_other_tokens_says_so() -> None:
    connection = connected()
    stream = submitted(connection)
    connection.receive(tokens(stream, 0, 5), 0.0)
    connection.receive(encode(End(stream.number, 1, 4, "length")), 0.0)
    connection.take(stream)
    with pytest.raises(StreamError, match="sent 4 tokens and 1 came"):
        connection.take(stream)


def test_credit_is_granted_as_tokens_are_taken_and_no_more() -> None:
    connection = connected(window=8)
    stream = submitted(connection)
    granted = 8
    for sequence in range(50):
        connection.receive(tokens(stream, sequence, sequence), 0.0)
    assert sent(connection) == []  # nothing was taken
    for taken in range(1, 51):
        connection.take(stream)
        for credit in sent(connection):
            assert isinstance(credit, Credit)
            granted += credit.tokens
        assert taken + 4 < granted <= taken + 8


def test_a_window_never_exceeds_the_servers_credit() -> None:
    connection = connected(window=1 << 30)
    assert connection.submit(make_request("a", {})).window == LIMITS.max_credit


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("busy", Busy),
        ("invalid", RequestError),
        ("malformed", RequestError),
        ("unexpected", RequestError),
        ("forbidden", RequestError),
        ("draining", ServerGone),
        ("internal", StreamError),
        ("a code of a later version", StreamError),
    ],
)
def test_an_error_refuses_one_request(code: str, kind: type[LowlatError]) -> None:
    connection = connected()
    stream, other = submitted(connection), submitted(connection)
    connection.receive(encode(Error(code, "why", number=stream.number, field="$.f", retry_after_ms=250)), 0.0)
    with pytest.raises(kind, match=r"why \(at \$\.f\)") as caught:
        connection.take(stream)
    if isinstance(caught.value, Busy):
        assert caught.value.retry_after_s == 0.25
    assert connection.take(stream) is None
    assert not other.ready
    assert connection.failure is None


@pytest.mark.parametrize(
    ("reason", "code", "kind"),
    [
        ("error", "not_finite", StreamError),
        ("error", None, StreamError),
        ("error", "slow_consumer", StreamError),
        ("cancelled", "slow_consumer", StreamError),
        ("cancelled", "shutdown", ServerGone),
        ("error", "device", ServerGone),
        ("error", "stalled", ServerGone),
    ],
)
def test_an_end_by_fault_is_raised_with_what_came(reason: Any, code: str | None, kind: type[StreamError]) -> None:
    connection = connected()
    stream = submitted(connection)
    connection.receive(tokens(stream, 0, 5, text="a"), 0.0)
    connection.receive(encode(End(stream.number, 1, 1, reason, None, code, "the reason")), 0.0)
    connection.take(stream)
    with pytest.raises(StreamError, match="the reason") as caught:
        connection.take(stream)
    assert type(caught.value) is kind
    assert (caught.value.token_ids, caught.value.text, caught.value.code) == ((5,), "a", code or "internal")


@pytest.mark.parametrize("code", [None, "deadline"])
def test_a_cancelled_request_ends_by_a_chunk(code: str | None) -> None:
    connection = connected()
    stream = submitted(connection)
    connection.cancel(stream.number)
    assert sent(connection) == [Cancel(stream.number)]
    connection.receive(encode(End(stream.number, 0, 0, "cancelled", None, code)), 0.0)
    chunk = connection.take(stream)
    assert chunk is not None
    assert (chunk.finish_reason, chunk.code) == ("cancelled", code)
    connection.cancel(stream.number)
    assert sent(connection) == []  # it has ended


def test_an_abandoned_request_is_cancelled_and_forgotten() -> None:
    connection = connected()
    stream = submitted(connection)
    assert connection.abandon(stream.number) is stream
    assert sent(connection) == [Cancel(stream.number)]
    assert connection.receive(tokens(stream, 0, 5), 0.0) is None
    assert connection.receive(encode(End(stream.number, 1, 1, "cancelled")), 0.0) is None
    assert connection.failure is None
    assert stream.ready


def test_a_lost_connection_ends_everything_with_what_came() -> None:
    connection = connected()
    stream = submitted(connection)
    connection.receive(tokens(stream, 0, 5, text="a"), 0.0)
    questions: list[Reply[Any]] = [connection.health(), connection.stats()]
    connection.fail("the connection was lost")
    assert connection.take(stream) is not None
    with pytest.raises(ServerGone, match="after 1 tokens: the connection was lost") as caught:
        connection.take(stream)
    assert (caught.value.token_ids, caught.value.text) == ((5,), "a")
    replies: list[Reply[Any]] = [*questions, connection.health(), connection.stats(), connection.drain(1.0)]
    for reply in replies:
        with pytest.raises(ServerGone):
            reply.take()
    with pytest.raises(ServerGone):
        connection.submit(make_request("a", {}))


def test_silence_is_probed_then_given_up() -> None:
    connection = connected()
    stream = submitted(connection)
    connection.attend(0.0)
    assert connection.tick(0.0) == HEARTBEAT_INTERVAL_S
    for second in (1.0, 2.0, 3.0):
        connection.tick(second)
        assert sent(connection) == [Health(0)]
        connection.tick(second + 0.1)
        assert sent(connection) == []
    connection.receive(encode(Pong(0, "serving", 0.0, 1, 0)), 3.5)
    connection.tick(SILENCE_S + 0.1)
    assert connection.failure is None
    connection.tick(3.5 + SILENCE_S)
    with pytest.raises(ServerGone, match="nothing came from the server"):
        connection.take(stream)


def test_silence_while_nobody_listened_says_nothing() -> None:
    connection = connected()
    submitted(connection)
    connection.attend(100.0)
    assert connection.tick(100.0) == HEARTBEAT_INTERVAL_S
    assert connection.failure is None


@pytest.mark.parametrize(
    "frame",
    [b"", b"\x82", b"\x82\xc0", b"\x83\x90", encode(Tokens(0, 0, b"123"))],
)
def test_a_broken_message_ends_the_connection(frame: bytes) -> None:
    connection = connected()
    stream = submitted(connection)
    connection.receive(frame, 0.0)
    with pytest.raises(ServerGone, match="not of the wire's format"):
        connection.take(stream)


def test_unknown_kinds_and_numbers_are_ignored() -> None:
    connection = connected()
    for frame in (b"\xf0later", encode(End(77, 0, 0, "stop")), encode(Error("internal", "", number=77))):
        assert connection.receive(frame, 0.0) is None
    assert connection.receive(encode(StatsReply({})), 0.0) is None
    assert connection.receive(encode(Pong(99, "serving", 0.0, 0, 0)), 0.0) is None
    assert connection.failure is None


def test_questions_are_answered_in_order() -> None:
    connection = connected()
    first, second, health, again = connection.stats(), connection.stats(), connection.health(), connection.health()
    asked = sent(connection)
    assert asked[:2] == [Stats(), Stats()]
    nonces = [message.nonce for message in asked[2:] if isinstance(message, Health)]
    connection.receive(encode(StatsReply({"n": 1})), 0.0)
    connection.receive(encode(StatsReply({"n": 2})), 0.0)
    for nonce in reversed(nonces):
        connection.receive(encode(Pong(nonce, "serving", 0.0, nonce, 0)), 0.0)
    assert (first.take(), second.take()) == ({"n": 1}, {"n": 2})
    assert [health.take().num_running, again.take().num_running] == nonces


def test_drain_is_understood_refused_or_done_at_once() -> None:
    connection = connected()
    reply = connection.drain(2.0)
    drain, health = sent(connection)
    assert drain == Drain(2.0)
    assert isinstance(health, Health)
    connection.receive(encode(Pong(health.nonce, "draining", 0.0, 1, 0)), 0.0)
    assert reply.take().state == "draining"
    refused = connection.drain(2.0)
    connection.receive(encode(Error("forbidden", "not yours")), 0.0)
    with pytest.raises(RequestError, match="not yours"):
        refused.take()
    assert connection.failure is None
    at_once = connection.drain(2.0)
    connection.receive(encode(Bye("shutdown")), 0.0)
    assert at_once.take().state == "draining"


def test_goodbye_and_refusals_of_the_connection() -> None:
    connection = connected()
    stream = submitted(connection)
    connection.receive(encode(Bye("dropped", "8 wrong messages")), 0.0)
    with pytest.raises(ServerGone, match=r"goodbye \(dropped\): 8 wrong messages"):
        connection.take(stream)
    for code, kind in (
        ("version", ConfigError),
        ("busy", Busy),
        ("forbidden", RequestError),
        ("internal", StreamError),
    ):
        fresh = ClientProtocol("ipc:///x", "", 8, 0.0)
        fresh.receive(encode(Error(code, "no")), 0.0)
        assert isinstance(fresh.failure, kind)
        with pytest.raises(kind):
            fresh.greeting.take()
    other = ClientProtocol("ipc:///x", "", 8, 0.0)
    other.receive(encode(welcome(version=2)), 0.0)
    assert isinstance(other.failure, ConfigError)
    twice = connected()
    twice.receive(encode(welcome(epoch="another")), 0.0)
    assert isinstance(twice.failure, ServerGone)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt is empty"),
        (b"raw", {}, "got bytes"),
        (None, {}, "got NoneType"),
        (5, {}, "got int"),
        ({"role": "user"}, {}, "got dict"),
        ([1, -5], {}, "token 1 is -5"),
        ([1, 1 << 31], {}, "token 1 is 2147483648"),
        ([1, "a"], {}, "token 1 is 'a'"),
        ([1, 1.5], {}, "token 1 is 1.5"),
        ([True], {}, "token 0 is True; ids are 32-bit integers"),
        ((1, False), {}, "token 1 is False"),
        (np.array([True, False]), {}, "token 0 is True"),
        (np.array(5), {}, r"got array\(5\)"),
        ("a", {"stop_token_ids": [1, True]}, r"stop_token_ids\[1\]: Expected `int`, got `bool`"),
        ("a", {"logit_bias": {True: 1.0}}, "logit_bias: Expected `int`, got `bool`"),
        ("a", {"logit_bias": {1: True}}, "logit_bias.*: Expected `float`, got `bool`"),
        ("a", {"draft_texts": [[5, True]]}, r"draft_texts\[0\]\[1\]: Expected `int`, got `bool`"),
        ([{"content": "a"}], {}, "missing required field `role`"),
        ([{"role": "user"}, 5], {}, r"messages\[1\]: Expected"),
        ([{"role": "user", "mood": "good"}], {}, "unknown field `mood`"),
        ("a", {"parse": "all"}, "parse: .*'all'; it is one of 'none', 'reasoning', 'tools'"),
        ("a", {"max_token": 2}, "unknown option 'max_token'; did you mean 'max_tokens'"),
        ("a", {"beams": 2}, "unknown option 'beams'; known: choice, draft_texts, frequency_penalty"),
        ("a", {"top_p": 1.5}, "top_p: Expected `float` <= 1.0, got 1.5"),
        ("a", {"temperature": float("nan")}, "temperature: .* got nan"),
        ("a", {"max_tokens": 0}, "max_tokens: Expected `int` >= 1, got 0"),
        ("a", {"seed": "x"}, "seed: Expected `int"),
        ("a", {"stop": ["ok", ""]}, r"stop\[1\]: "),
        ("a", {"logit_bias": {5: 101.0}}, "logit_bias"),
        ("a", {"logit_bias": {"x": 1.0}}, "logit_bias: Expected `int`, got `str`, got {'x': 1.0}"),
        ("a", {"deadline_s": 0}, "deadline_s must be above 0"),
        ("a", {"deadline_s": "soon"}, "deadline_s must be a number"),
        ("a", {"deadline_s": float("inf")}, "deadline_s must be a number"),
        ("a", {"template_options": {}}, "template_options are for chat"),
        ([{"role": "user"}], {"template_options": 5}, "template_options must be a mapping"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(prompt: Any, options: dict[str, Any], message: str) -> None:
    rest = {name: options.pop(name) for name in ("deadline_s", "template_options") if name in options}
    with pytest.raises(RequestError, match=message):
        make_request(prompt, options, **rest)


def test_numbers_of_numpy_are_pythons() -> None:
    given: dict[str, Any] = {
        "stop_token_ids": np.array([1, 2]),
        "logit_bias": {np.int64(3): np.float32(0.5)},
        "draft_texts": [np.array([4, 5]), [np.int32(6)], "text"],
        "seed": np.int64(7),
        "temperature": np.float32(0.25),
    }
    plain = {"stop_token_ids": [1, 2], "logit_bias": {3: 0.5}, "draft_texts": [[4, 5], [6], "text"]}
    assert make_request("a", given) == make_request("a", {**plain, "seed": 7, "temperature": 0.25})
    for name, value in (("stop_token_ids", np.array([True])), ("seed", np.bool_(True))):
        with pytest.raises(RequestError, match=f"{name}.*got `bool`"):
            make_request("a", {name: value})


def test_pieces_of_open_prompts_hold_ids_and_no_bools() -> None:
    array: Any = np.array([1, 2], dtype=np.int16)
    assert list(pieces_of(array)) == [pack_tokens([1, 2])]
    with pytest.raises(RequestError, match="token 1 is True"):
        pieces_of([1, True])


def test_content_in_parts_of_text_is_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    contents: tuple[Any, ...] = ("a\nb", parts)
    whole, several = (make_request([{"role": "user", "content": each}], {}) for each in contents)
    assert whole.submit == several.submit
    with pytest.raises(RequestError, match=r"messages\[1\]\.content\[0\] is of the type 'str'; content is text"):
        make_request([{"role": "user", "content": content} for content in ("a", ["a"])], {})


def test_requests_that_have_no_encoding_or_no_room_are_refused() -> None:
    connection = connected(limits=msgspec.structs.replace(LIMITS, max_message_bytes=1000))
    for prompt, options, message in (
        ("x" * 1001, None, "^prompt: the request has 10[0-9]* bytes and the server takes 1000 .max_message_bytes."),
        ([1] * 251, None, "^prompt: the request has 1004 bytes and the server takes 1000"),
        ([{"role": "user"}], {"a": "x", "b": "y" * 1000}, "^template_options.b: the request has"),
        ([{"role": "user"}], {"a b": "y" * 1000}, "^template_options: the request has"),
        ("a\ud800", None, "text is not Unicode: a lone surrogate at character 1"),
        ([{"role": "user"}], {"a": object()}, "^template_options.a: object and what is not finite are no JSON values"),
        ([{"role": "user"}], {"a": {"b": [1 << 64]}}, "^template_options.a: the integer 18446744073709551616 is not"),
        ([{"role": "user"}], {"a b": -(1 << 63) - 1}, "^template_options: the integer -9223372036854775809 is not"),
        ([{"role": "user", "tool_calls": [{"a": 1 << 70}]}], None, r"^messages\[0\].tool_calls: the integer"),
    ):
        with pytest.raises(RequestError, match=message):
            connection.submit(make_request(prompt, {}, template_options=options))
    assert connection.num_streams == 0
    assert sent(connection) == []


def test_forms_of_prompts_and_options() -> None:
    connection = connected()
    bias = {5: 1}
    sampling = {"stop": "END", "stop_token_ids": [1, 2], "logit_bias": bias, "logprobs": 3, "seed": 1}
    connection.submit(make_request("text", sampling, deadline_s=1.5))
    connection.submit(make_request(range(3), {}))
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "thinking": "hm"}]
    connection.submit(make_request(chat, {}, template_options={"enable_thinking": False}))
    frames = list(connection.outgoing)
    text, _ = decode_client(frames[0])
    assert isinstance(text, Submit)
    assert (text.text, text.deadline_ms, text.sampling.stop) == ("text", 1500, ("END",))
    assert (text.sampling.logit_bias, text.sampling.stop_token_ids) == ({5: 1.0}, (1, 2))
    assert decode_client(frames[1])[1] == pack_tokens([0, 1, 2])
    messages, _ = decode_client(frames[2])
    assert isinstance(messages, Submit)
    assert messages.messages is not None
    assert [message.thinking for message in messages.messages] == [None, "hm"]
    assert messages.template_options == {"enable_thinking": False}
    numbers = [decode_client(frame)[0].number for frame in frames]  # type: ignore[attr-defined]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("ü" * (1 << 20), r"^prompt: .* 2097[0-9]* bytes, more than 2097152; send a longer prompt as token ids"),
        ([{"role": "user", "tool_calls": [{"a": ["x"] * 9_000}]}] * 2, "^messages: .* more than 16384 values"),
    ],
)
def test_what_a_server_would_refuse_unread_is_not_sent(prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_request(prompt, {}).frames(0, 1, 1 << 23)


def test_integers_of_64_bits_are_sent() -> None:
    options = {"least": -(1 << 63), "most": [(1 << 64) - 1]}
    frames = make_request([{"role": "user"}], {}, template_options=options).frames(0, 1, 1 << 23)
    submit, _ = decode_client(frames)
    assert isinstance(submit, Submit) and submit.template_options == options
