"""Harmony's channels: well-formed answers as published, and any stream of tokens whatever."""

from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from text_tokenizers import byte_level, sentencepiece
from tokenizers import Tokenizer

from lowlat.text import HarmonyParser, TextCodec, parse_channels
from lowlat.text.harmony import ENDS, MAX_HEADER_CHARACTERS

MARKERS = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", *ENDS]


@cache
def codec(kind: str = "byte") -> TextCodec:
    """A small tokenizer with Harmony's markers."""
    tokenizer = Tokenizer.from_str((byte_level() if kind == "byte" else sentencepiece()).to_str())
    tokenizer.add_special_tokens(MARKERS)
    return TextCodec(tokenizer)


def ids(text: str) -> list[int]:
    return codec().encode(text, add_special_tokens=False, allow_special=True)


def seen(text: str) -> list[tuple[str | None, str, bool]]:
    found = parse_channels(codec(), ids(text))
    assert found is not None
    return [(message.channel, message.text, message.complete) for message in found]


ANSWER = (
    "<|channel|>analysis<|message|>It asks for 2 + 2.<|end|><|start|>assistant<|channel|>final<|message|>4, naïve 😀"
    "<|return|>"
)


def test_an_answer_has_its_channels() -> None:
    assert seen(ANSWER) == [("analysis", "It asks for 2 + 2.", True), ("final", "4, naïve 😀", True)]
    assert parse_channels(codec(), ANSWER) == parse_channels(codec(), ids(ANSWER))


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.weather <|constrain|>json",
        "<|start|>assistant to=functions.weather<|channel|>commentary <|constrain|>json",
        " to=functions.weather<|channel|>commentary <|constrain|>json",
        "<|channel|>commentary to=functions.weather<|channel|>commentary json<|constrain|>json",
        "<|channel|>analysis to=functions.weather<|constrain|>json<|channel|>commentary",
    ],
)
def test_a_call_names_recipient_and_type(header: str) -> None:
    (call,) = parse_channels(codec(), f'{header}<|message|>{{"a": 1}}<|call|>') or []
    assert (call.channel, call.recipient, call.content_type) == ("commentary", "functions.weather", "json")
    assert (call.role, call.text, call.complete) == ("assistant", '{"a": 1}', True)


def test_a_role_is_the_headers_own_or_what_the_prompt_ends_with() -> None:
    found = parse_channels(codec(), "<|message|>a<|end|><|start|>user<|message|>b<|end|><|message|>c", role="system")
    assert found is not None
    assert [(message.role, message.channel, message.text) for message in found] == [
        ("system", None, "a"),
        ("user", None, "b"),
        (None, None, "c"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("no format at all", [(None, "no format at all", False)]),
        ("<|channel|>analysis<|message|>cut of", [("analysis", "cut of", False)]),
        ("<|channel|>analysis", [(None, "", False)]),
        ("<|channel|>analysis<|end|>", [(None, "", False)]),
        ("<|channel|>commentary to=functions.f <|constrain|>js", [(None, "", False)]),
        (" to=functions.f", [(None, "", False)]),
        ("tomorrow", [(None, "tomorrow", False)]),
        ("<|end|><|return|>", [(None, "", False), (None, "", False)]),
        (
            "<|channel|>analysis<|message|>no end<|start|>assistant<|channel|>final<|message|>x<|return|>",
            [("analysis", "no end", False), ("final", "x", True)],
        ),
        (
            "<|channel|>analysis<|message|>no end<|channel|>final<|message|>x<|end|>",
            [("analysis", "no end", False), ("final", "x", True)],
        ),
        ("<|channel|>a<|channel|>final<|message|>x<|end|>", [("final", "x", True)]),
        ("<|channel|>final<|message|>a<|constrain|>b<|end|>", [("final", "ab", True)]),
        ("<|channel|>final<|message|>x<|end|> tail", [("final", "x", True), (None, " tail", False)]),
    ],
)
def test_what_is_not_in_the_format_is_text(text: str, expected: list[tuple[str | None, str, bool]]) -> None:
    assert seen(text) == expected


def test_text_without_a_header_is_shown_as_it_comes() -> None:
    parser = HarmonyParser(codec())
    letter = ids("q")[0]
    deltas = [delta for _ in range(3 * MAX_HEADER_CHARACTERS) for delta in parser.push([letter])]
    assert "".join(delta.text for delta in deltas) == "q" * 3 * MAX_HEADER_CHARACTERS  # before `finish`
    assert {(delta.message, delta.channel) for delta in deltas} == {(0, None)}


def test_spelling_a_marker_is_not_writing_one() -> None:
    spelled = [token for letter in "<|end|>" for token in ids(letter)]
    found = parse_channels(codec(), [*ids("<|channel|>final<|message|>"), *spelled, *ids("<|return|>")])
    assert found is not None and [(message.text, message.complete) for message in found] == [("<|end|>", True)]


def test_other_models_speak_it_not() -> None:
    assert parse_channels(None, [1, 2]) is None
    assert parse_channels(TextCodec(byte_level()), [1, 2]) is None
    assert not HarmonyParser.speaks(None) and HarmonyParser.speaks(codec())


MARKER_IDS = st.sampled_from(MARKERS)


@given(
    st.lists(st.one_of(MARKER_IDS, st.integers(0, 360), st.integers(-(1 << 70), 1 << 70)), max_size=80),
    st.lists(st.integers(1, 7), min_size=1, max_size=20),
    st.sampled_from(["byte", "sentencepiece"]),
)
def test_any_stream_is_taken_whole(stream: list[int | str], sizes: list[int], kind: str) -> None:
    own = codec(kind)
    tokens = [own.token_id(item) if isinstance(item, str) else item for item in stream]
    numbers = [token for token in tokens if token is not None]
    parser, deltas, at = HarmonyParser(own), [], 0
    for size in sizes * (len(numbers) + 1):
        deltas += parser.push(numbers[at : at + size])
        at += size
        if at >= len(numbers):
            break
    deltas += parser.finish()
    messages = parser.messages
    with_text = [message for message in messages if message.text or message.recipient]
    for place, message in enumerate(with_text):
        mine = [delta for delta in deltas if delta.message == place]
        assert "".join(delta.text for delta in mine) == message.text
        assert {delta.channel for delta in mine} == {message.channel}
    assert sum(len(delta.text) for delta in deltas) == sum(len(message.text) for message in messages)
    assert messages == parse_channels(own, numbers)  # however the stream was cut
    assert parser.push([5]) == [] and parser.finish() == [] and parser.messages == messages


@given(st.lists(st.tuples(st.sampled_from(["analysis", "commentary", "final"]), st.text(max_size=20)), max_size=5))
@example([("analysis", "é")])  # of which one byte alone is kept
def test_what_was_written_is_read_again(written: list[tuple[str, str]]) -> None:
    stream: list[int] = []
    expected = []
    for channel, text in written:
        content = [token for token in ids(text) if codec().decode([token], skip_special_tokens=True)]
        stream += [*ids(f"<|start|>assistant<|channel|>{channel}<|message|>"), *content, *ids("<|end|>")]
        expected.append((channel, codec().decode(content)))
    found = parse_channels(codec(), stream)
    assert found is not None and [(message.channel, message.text) for message in found] == expected
    assert all(message.complete and message.role == "assistant" for message in found)
