"""The incremental detokeniser against decoding everything at once, and stop strings against a full search."""

import time
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from text_tokenizers import KINDS, codec
from tokenizers import Tokenizer, decoders, models

from lowlat.errors import ConfigError, RequestError
from lowlat.text import IncrementalDetokenizer, TextCodec
from lowlat.text.stops import StopMatcher

TEXTS = st.text(
    st.one_of(
        st.sampled_from("ab. \n▁é日本語。你😀👩\u200d\u0301\ufffd"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=40,
)


def joined(lists: list[list[int]]) -> list[int]:
    return [token for tokens in lists for token in tokens]


def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    """Token ids: of some text, or any at all, ids outside the vocabulary among them."""
    size = codec(kind).vocab_size
    some = st.lists(st.integers(0, size + 1), max_size=40)
    if kind in ("sentencepiece", "gemma"):  # 3 to 258 are bytes: mostly characters made of them
        multibyte = st.text(st.sampled_from("é語😀 a"), max_size=6).map(
            lambda text: [byte + 3 for byte in text.encode()]
        )
        few = st.lists(st.integers(0, size + 1), max_size=6)
        some = st.one_of(some, st.lists(st.one_of(few, multibyte), max_size=6).map(joined))
    encoded = TEXTS.map(lambda text: codec(kind).encode(text, add_special_tokens=False))
    return st.one_of(some, encoded)


def cut(ids: list[int], data: st.DataObject) -> list[list[int]]:
    """Cut ids into pushes, of 0 to 8 tokens."""
    pushes = []
    while ids:
        size = data.draw(st.integers(0, 8))
        pushes.append(ids[:size])
        ids = ids[size:]
    return pushes


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=25)
def test_joined_text_equals_decoding_at_once(kind: str, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(ids_of(kind))
    detokenizer = IncrementalDetokenizer(codec(kind), skip_special_tokens=skip)
    pieces = []
    for push in cut(ids, data):
        delta = detokenizer.push(push)
        assert (delta.stopped, delta.num_tokens_used) == (None, len(push))
        pieces.append(delta.text)
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == codec(kind).decode(ids, skip_special_tokens=skip)
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_prefix_takes_its_certain_text_and_no_more(kind: str, data: st.DataObject) -> None:
    prefix, ids = data.draw(ids_of(kind)), data.draw(ids_of(kind))
    before = IncrementalDetokenizer(codec(kind)).push(prefix).text
    detokenizer = IncrementalDetokenizer(codec(kind), prefix_ids=prefix)
    text = before + detokenizer.push(ids).text + detokenizer.finish()
    assert text == codec(kind).decode(prefix + ids)


def test_a_prefix_keeps_the_leading_space() -> None:
    ids = codec("sentencepiece").encode("a b", add_special_tokens=False)
    assert IncrementalDetokenizer(codec("sentencepiece")).push(ids).text == "a b"
    assert IncrementalDetokenizer(codec("sentencepiece"), prefix_ids=ids).push(ids).text == " a b"


def test_characters_come_whole_and_at_once() -> None:
    text = "a😀語"
    ids = [codec("byte_level").token_id(character) for character in "ðŁĺĢ"]  # the bytes of the emoji
    assert None not in ids
    detokenizer = IncrementalDetokenizer(codec("byte_level"))
    texts = [detokenizer.push([token]).text for token in ids if token is not None]
    assert texts == ["", "", "", "😀"]
    assert detokenizer.push([token for token in ids[:3] if token is not None]).text == ""
    assert detokenizer.finish() == "\ufffd"
    whole = IncrementalDetokenizer(codec("byte_level"))
    assert whole.push(codec("byte_level").encode(text)).text == text


def test_an_invalid_run_of_byte_tokens_is_replaced_whole() -> None:
    detokenizer = IncrementalDetokenizer(codec("gemma"))
    run = [byte + 3 for byte in "é".encode() + b"\xff"]
    assert detokenizer.push(run).text == ""  # certain only when the run has ended
    a = codec("gemma").token_id("a")
    assert a is not None
    assert detokenizer.push([a]).text == "\ufffd" * 3 + "a" == codec("gemma").decode([*run, a])


def naive_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The match with the earliest end, the longest of those: by looking at every prefix of the text."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            stop = max(matching, key=len)
            return text[: end - len(stop)], stop
    return text, None


STOPS = st.lists(st.text("ab. é日", min_size=1, max_size=4), min_size=1, max_size=4)


@given(stops=STOPS, pieces=st.lists(st.text("ab. é日", max_size=5), max_size=12))
@example(stops=["abcd", "bc"], pieces=["a", "bcd"])
@example(stops=["aab", "ab"], pieces=["a", "a", "a", "b"])
def test_the_matcher_agrees_with_a_full_search(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    fed, found = "", None
    for index, piece in enumerate(pieces):
        certain, found = matcher.feed(piece)
        fed += certain
        expected, stop = naive_stop("".join(pieces[: index + 1]), stops)
        assert found == stop
        if stop is not None:
            assert fed == expected
            return
        held = expected[len(fed) :]
        assert expected.startswith(fed)
        assert held == longest_beginning(expected, stops)
    assert fed + matcher.finish() == "".join(pieces)


def test_long_stop_strings_cost_nothing_until_they_match_and_little_then() -> None:
    stops = [chr(97 + place) * 1023 + "!" for place in range(16)]
    made = []
    for _ in range(20):
        start = time.perf_counter()
        matcher = StopMatcher(stops)
        made.append(time.perf_counter() - start)
    assert min(made) < 0.002  # of 16 kB; nothing of it is read before text comes
    text = "a" * 5000 + "b" * 2000
    start = time.perf_counter()
    certain, found = matcher.feed(text)
    assert time.perf_counter() - start < 1.0  # of which it is 20 ms: no character is looked at again and again
    assert (found, certain + matcher.finish()) == (None, text)
    assert matcher.feed("x" + "p" * 1024 + "!y") == ("xp", stops[15])


def longest_beginning(text: str, stops: Sequence[str]) -> str:
    """The longest end of the text that begins a stop string, and so must be held back; no more is."""
    ends = [stop[:size] for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])]
    return max(ends, key=len)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "word_piece"])
@given(data=st.data(), stops=STOPS, after=st.integers(0, 6))
def test_stops_do_not_depend_on_the_pushes(kind: str, data: st.DataObject, stops: list[str], after: int) -> None:
    ids = data.draw(ids_of(kind))
    one_by_one = IncrementalDetokenizer(codec(kind))
    texts = [one_by_one.push([token]).text for token in ids]
    start = "".join(texts[:after])
    tail = "".join(texts[after:])
    rest = one_by_one.finish() if len(ids) > after else ""
    at_the_end = "" if len(ids) > after else codec(kind).decode(ids)[len(start) :]
    expected, expected_stop = naive_stop(tail + rest, stops)
    expected_used = len(ids)
    for index in range(after, len(ids)):
        if naive_stop("".join(texts[after : index + 1]), stops)[1] is not None:
            expected_used = index + 1
            break

    detokenizer = IncrementalDetokenizer(codec(kind), stop=stops, stop_enabled_after=after)
    text, used = "", 0
    for push in cut(ids, data):
        delta = detokenizer.push(push)
        text += delta.text
        used += delta.num_tokens_used
        if delta.stopped is not None:
            assert detokenizer.push([0]).num_tokens_used == 0
            break
    text += detokenizer.finish()
    assert text == start + expected + at_the_end
    assert detokenizer.stopped == expected_stop
    assert used == expected_used


def test_an_earlier_completion_wins_then_the_longest() -> None:
    ids = codec("byte_level").encode("xabcdef", add_special_tokens=False)
    results = [(["abcd", "bc"], "xa", "bc"), (["c", "bc", "abc"], "x", "abc"), (["def", "de"], "xabc", "de")]
    for stops, text, stopped in results:
        detokenizer = IncrementalDetokenizer(codec("byte_level"), stop=stops)
        delta = detokenizer.push(ids)
        assert (delta.text + detokenizer.finish(), delta.stopped) == (text, stopped)


@pytest.mark.parametrize("stop", ["ab", [""], ["a", 5], [None]])
def test_bad_stops_are_refused(stop: list[str]) -> None:
    with pytest.raises(RequestError, match="stop must be a sequence of non-empty strings"):
        IncrementalDetokenizer(codec("byte_level"), stop=stop)


def test_pushing_after_the_end_is_an_error() -> None:
    detokenizer = IncrementalDetokenizer(codec("byte_level"))
    detokenizer.finish()
    with pytest.raises(RuntimeError, match="push after finish"):
        detokenizer.push([1])


@pytest.mark.parametrize("kind", ["byte_level", "gemma"])
def test_long_outputs_cost_the_same_a_token(kind: str) -> None:
    """Ten times the tokens take about ten times as long; decoding all of them each time would take a hundred."""
    runs = {"byte_level": [200] * 4, "gemma": [byte + 3 for byte in "é".encode()] * 2}
    times = []
    for count in (2_000, 20_000):
        ids = (runs[kind] * count)[:count]
        detokenizer = IncrementalDetokenizer(codec(kind), stop=["never seen", "\ufffd" * 200 + "x"])
        start = time.process_time()
        for token in ids:
            detokenizer.push([token])
        detokenizer.finish()
        times.append(time.process_time() - start)
    assert times[1] < 40 * max(times[0], 0.002)


def test_decoders_that_look_ahead_are_refused_by_name() -> None:
    tokenizer = Tokenizer(models.WordLevel(vocab={"a": 0}, unk_token="a"))
    for decoder, name in [
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.CTC(), "CTC"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]), "Replace follows Fuse"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "Strip follows Fuse"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]), r"ByteLevel \+ Strip"),
    ]:
        tokenizer.decoder = decoder
        with pytest.raises(ConfigError, match=name):
            TextCodec(tokenizer)


def test_a_vocabulary_without_a_plain_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="no plain token"):
        TextCodec(Tokenizer(models.WordLevel(vocab={".": 0}, unk_token=".")))
