"""Prompts that are read while they are written: the tokens of the whole prompt, and what is left to do at its end."""

import random
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from recording import check_invariants, prompt_of, run_all, run_one
from stages import later, wide
from text_tokenizers import KINDS, byte_level, write_directory
from tiny_models import PairPaths, make_pair, make_target
from tiny_mtp import add_mtp
from unit.test_text_special import BOS, TEMPLATES, like

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.errors import RequestError
from lowlat.ipc.messages import Message
from lowlat.options.request import StepOutput
from lowlat.text import TextCodec
from lowlat.text.growing import GrowingPrompt, GrowingText
from lowlat.text.templates.messages import encode_messages, grow_messages

CHUNK = 8
OPTIONS: dict[str, Any] = {"max_batch": 2, "max_context": 160, "block_size": 4, "prefill_chunk": CHUNK} | {
    "device": "cpu",
    "dtype": "float32",
}
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, seed=5)
PIECES = [
    *("the", "dog's", "don", "'t", " ", "  ", "\n", "\r\n", "word", "wörter", "é", "e\u0301", "\u0301", "日本語"),
    *("。", "，", "x", "<|im_start|>", "<|im_", "end|>", "<think>", "1234", "12", "!", "...", "😀", "👩‍👩‍👧"),
    *("a b", "ab", ",", "слово", "한국어", "é x", "日本", " a", " the", ".", "</s>", "<s>", "<|begin_of_text|>", "\t"),
]


@cache
def codec_of(kind: str) -> TextCodec:
    if kind in TEMPLATES:
        named = {"bos_token": BOS[kind]} if kind in BOS else {}
        return TextCodec(like(kind), special_tokens=named, add_bos=kind in BOS or None)
    return TextCodec(KINDS[kind]())


def cut(text: Sequence[Any], source: random.Random, most: int) -> list[Any]:
    """A text, or token ids, in pieces at random."""
    found, start = [], 0
    while start < len(text):
        stop = start + source.randint(1, most)
        found.append(text[start:stop])
        start = stop
    return found


@pytest.mark.parametrize("allow_special", [False, True])
@pytest.mark.parametrize("kind", [*TEMPLATES, *KINDS])
def test_a_text_in_pieces_has_the_tokens_of_the_whole(kind: str, allow_special: bool) -> None:
    codec, source, num_held, num_characters = codec_of(kind), random.Random(kind), 0, 0
    for _ in range(30):
        text = "".join(
            source.choice(PIECES) + (" " if source.random() < 0.4 else "") for _ in range(source.randint(1, 40))
        )
        try:
            whole = codec.encode(text, allow_special=allow_special)
        except RequestError:
            continue
        growing = GrowingText(
            codec.cuts,
            lambda text, around: codec.encode(text, add_special_tokens=around, allow_special=allow_special),
            is_start=True,
        )
        found: list[int] = []
        for piece in cut(text, source, 9):
            found += growing.append(piece)
            if source.random() < 0.2:
                growing.rest()
        num_held, num_characters = num_held + growing.num_held, num_characters + len(text)
        assert found + growing.rest() == whole, text
    assert num_held < num_characters / 2 or kind in ("word_piece", "words")


@pytest.mark.parametrize("allow_special", [False, later(True)])
@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_chat_in_pieces_has_the_tokens_of_the_whole(kind: str, allow_special: bool) -> None:
    """Its last message grows; templates that leave spaces out, or write a message twice, are among those tried."""
    source, num_certain, num_all = random.Random(kind), 0, 0
    named = {"bos_token": BOS[kind], "eos_token": "</s>"} if kind in BOS else {}
    twice = "{% for m in messages %}{{ m['content'] | length }} {{ m['content'] }} {{ m['content'] }}{% endfor %}"
    for template in (TEMPLATES[kind], twice):
        codec = TextCodec(like(kind), special_tokens=named, templates={"default": template})
        try:
            for number in range(12):
                content = "".join(
                    source.choice(PIECES) + " " * source.randrange(2) for _ in range(source.randrange(30))
                )
                before = [Message("system", "Be brief. <|im_end|>"), Message("user", None)]
                how: dict[str, Any] = {"allow_special": allow_special, "max_context": 4000, "max_tokens": 1}
                growing = grow_messages(codec, before, {}, **how)
                found: list[int] = []
                try:
                    whole = encode_messages(codec, [before[0], Message("user", content)], {}, **how)
                except RequestError:
                    continue
                for piece in cut(content, source, 9):
                    found += growing.append(piece)
                    if source.random() < 0.2:
                        growing.rest()
                if template != twice:
                    num_certain, num_all = num_certain + len(found), num_all + len(whole)
                assert found + growing.rest() == whole, (number, content)
        finally:
            codec.close()
    assert num_certain > 0.4 * num_all
    with pytest.raises(RequestError, match="token ids go with a plain prompt"):
        growing.append([1])


@pytest.mark.parametrize("kind", ["qwen", "smollm"])
def test_what_is_held_back_is_bounded(kind: str) -> None:
    """A word without an end, and spaces that begin a message, are refused when no context has room for them."""
    codec = TextCodec(codec_of(kind)._tokenizer, templates={"default": TEMPLATES["qwen"]})
    limits: dict[str, Any] = {"allow_special": False, "max_context": 200, "max_tokens": 12}
    plain, chat = GrowingPrompt(codec, **limits), grow_messages(codec, [Message("user", None)], {}, **limits)
    for growing, piece in ((plain, "x" * 10_000), (chat, " " * 10_000)):
        with pytest.raises(RequestError, match=r"and max_tokens 12 exceed 200 \(max_context\)"):
            for _ in range(200):
                growing.append(piece)
    codec.close()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PairPaths]:
    found = {family: make_pair(tmp_path_factory.mktemp(family), family) for family in ("llama", "gpt_oss")}
    hybrid = tmp_path_factory.mktemp("hybrid")
    make_target(hybrid, "qwen3_5_text", gain=0.3)
    add_mtp(hybrid, copies=True)
    return {**found, "qwen3_5_text": PairPaths(hybrid, hybrid)}


def speculation(pair: PairPaths) -> SpeculativeConfig:
    own: dict[str, Any] = {"method": "mtp"} if pair.head == pair.target else {"model": pair.head}
    return SpeculativeConfig(num_speculative_tokens=3, strict=True, **own)


@pytest.mark.second
@pytest.mark.parametrize("family", ["llama", wide("gpt_oss"), "qwen3_5_text"])
@pytest.mark.parametrize("reuse", [True, wide(False)])
def test_an_open_prompt_has_the_answer_of_the_whole(family: str, reuse: bool, pairs: dict[str, PairPaths]) -> None:
    """However it comes, next to others, and after answers that were begun on trial."""
    prompts = [prompt_of(67), prompt_of(3, seed=1), prompt_of(2 * CHUNK, seed=2), prompt_of(41, seed=3)]
    options, source = {**OPTIONS, "prefix_reuse": reuse}, random.Random(family)
    with Runtime.load(pairs[family].target, speculation(pairs[family]), **options) as runtime:
        expected = [run_one(runtime, prompt, SAMPLED) for prompt in prompts]
    with Runtime.load(pairs[family].target, speculation(pairs[family]), **options) as runtime:
        tokens: dict[str, list[int]] = defaultdict(list)
        opened = [(runtime.open_prompt(SAMPLED), cut(prompt, source, 19)) for prompt in prompts]
        while any(pieces for _, pieces in opened):
            handle, pieces = source.choice([each for each in opened if each[1]])
            handle.append(pieces.pop(0))
            if source.random() < 0.4 or not pieces:
                handle.finish(speculative=True)
            for _ in range(source.randint(0, 9)):
                for output in runtime.step():
                    tokens[output.request_id] += output.token_ids
            assert not tokens
            runtime.summary()  # an answer on trial that has ended has not, for the books
            check_invariants(runtime)
        for handle, _ in opened:
            handle.finish()
        tokens.update(run_all(runtime))
        assert [tokens[handle.request_id] for handle, _ in opened] == expected
        assert all(runtime.metrics(handle.request_id).completion_tokens == 12 for handle, _ in opened)


def test_at_its_end_a_chunk_is_left_to_read(pairs: dict[str, PairPaths], monkeypatch: pytest.MonkeyPatch) -> None:
    """All that was there before was read before: of ids one chunk at most, whatever the length."""
    with Runtime.load(pairs["llama"].target, prefix_reuse=False, **OPTIONS) as runtime:
        ran: list[int] = []
        prefill = runtime.executor.prefill

        def counted(size: int, *others: Any) -> None:
            ran.append(size)
            prefill(size, *others)

        monkeypatch.setattr(runtime.executor, "prefill", counted)
        for count in (1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 5 * CHUNK + 3):
            handle = runtime.open_prompt(SAMPLED)
            for token in prompt_of(count):
                handle.append([token])
                while runtime.busy:
                    assert not runtime.step()
            before = len(ran)
            assert before == (count - 1) // CHUNK
            handle.finish()
            (output,) = runtime.step()
            assert len(output.token_ids) == 1 and len(ran) == before + 1
            run_all(runtime)
            ran.clear()


def test_one_of_higher_priority_takes_a_slot_and_pins_nothing(pairs: dict[str, PairPaths]) -> None:
    with Runtime.load(pairs["llama"].target, **{**OPTIONS, "max_batch": 1}) as runtime:
        low = runtime.submit(prompt_of(5), SamplingParams(max_tokens=30))
        runtime.step()
        handle = runtime.open_prompt(SamplingParams(max_tokens=4, priority=1))
        handle.append(prompt_of(3 * CHUNK))
        handle.finish()
        ended: list[str] = []
        while runtime.busy:
            ended += [output.request_id for output in runtime.step() if output.finish_reason is not None]
        assert ended == [handle.request_id, low]
        assert runtime.kvcache.stats().num_pinned == 0 < runtime.kvcache.stats().num_evictable


def test_an_open_prompt_goes_on_with_a_session(pairs: dict[str, PairPaths]) -> None:
    """Its prefix stays, of what was withdrawn nothing does, and no chunk of its own counts as cached."""
    with Runtime.load(pairs["llama"].target, **OPTIONS) as runtime:
        for turn in range(2):
            session = runtime.session("agent")
            prompt = [*session.token_ids, *prompt_of(3 * CHUNK, seed=turn)]
            handle = runtime.open_prompt(SAMPLED, session="agent")
            handle.append(prompt[:-2])
            handle.finish(speculative=True)
            for _ in range(20):
                assert not runtime.step()
            handle.append(prompt[-2:])
            handle.finish()
            answer = run_all(runtime)[handle.request_id]
            assert list(session.token_ids) == [*prompt, *answer]
            assert (runtime.metrics(handle.request_id).cached_prompt_tokens >= 3 * CHUNK) == bool(turn)
            assert runtime.kvcache.stats().num_pinned > 0
        session.close()
        assert runtime.kvcache.stats().num_pinned == 0
        check_invariants(runtime)


def test_text_is_read_up_to_the_last_word(pairs: dict[str, PairPaths], tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", "llama", vocab_size=400) and tmp_path / "target"
    write_directory(target, byte_level(), eos_token="</s>")
    text = "the quick brown fox jumps over the lazy dog, and the dog's not amused. " * 3
    with Runtime.load(target, prefix_reuse=False, **{**OPTIONS, "max_context": 400}) as runtime:
        whole = runtime.submit(text, SAMPLED)
        expected = run_all(runtime)[whole]
        handle = runtime.open_prompt(SAMPLED)
        for piece in cut(text, random.Random(1), 7):
            handle.append(piece)
            while runtime.busy:
                runtime.step()
        start = runtime._requests[handle.request_id].opening
        handle.finish()
        assert start is not None and len(runtime._requests[handle.request_id].prompt) - start.num_certain < 12
        assert run_all(runtime)[handle.request_id] == expected
        with_ids = runtime.open_prompt(SAMPLED)
        for piece in ("the quick brown", [5, 6], " fox", "es", [7]):
            with_ids.append(piece)
        with_ids.finish()
        codec = runtime.codec
        assert codec is not None
        parts = [codec.encode(part, add_special_tokens=False) for part in ("the quick brown", " foxes")]
        assert list(runtime._requests[with_ids.request_id].prompt) == [*parts[0], 5, 6, *parts[1], 7]
        run_all(runtime)


def test_refusals(pairs: dict[str, PairPaths]) -> None:
    with Runtime.load(pairs["llama"].target, pause_deadline_s=0.05, **OPTIONS) as runtime:
        handle = runtime.open_prompt(SAMPLED, max_prompt_tokens=20)
        with pytest.raises(RequestError, match="needs 1 at least"):
            handle.finish()
        with pytest.raises(RequestError, match="21 tokens exceeds the 20 that max_context, kv_blocks and max_prompt_t"):
            runtime.finish_prompt(handle.request_id, [1] * 21)
        with pytest.raises(RequestError, match="needs tokenizer"):
            handle.append("text")
        with pytest.raises(RequestError, match="open prompt: finish it, or cancel it"):
            runtime.pause(handle.request_id)
        handle.append(prompt_of(19))
        with pytest.raises(RequestError, match="prompt of 21 tokens exceeds the 20"):
            handle.append([1, 2])
        with pytest.raises(RequestError, match="a part of the prompt was refused"):
            handle.finish()
        handle.cancel()
        (output,) = runtime.step()
        assert output.finish_reason == "cancelled" and not runtime.busy
        idle = runtime.open_prompt(SAMPLED)
        idle.append([1])
        idle.finish(speculative=True)
        outputs: list[StepOutput] = []
        until = time.monotonic() + 20
        while not outputs and time.monotonic() < until:
            outputs = runtime.step()
        assert [(output.request_id, output.error_code) for output in outputs] == [(idle.request_id, "deadline")]
        done = runtime.open_prompt(SAMPLED)
        done.append([1])
        done.finish()
        with pytest.raises(RequestError, match="it was finished"):
            done.append([2])
        with pytest.raises(RequestError, match="it was finished"):
            done.finish()
        run_all(runtime)
        check_invariants(runtime)
