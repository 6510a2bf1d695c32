"""The adapters: the wire's sampling is the runtime's own, and a Runtime after them says what it says in process."""

import re
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from text_tokenizers import byte_level, write_directory
from tiny_models import make_pair, make_target

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.errors import CapacityError, LowlatError, RequestError
from lowlat.ipc.engine import Codec, Engine
from lowlat.ipc.wire import Message, Sampling
from lowlat.options.request import MAX_CHOICES, MAX_DRAFT_TEXTS, MAX_GRAMMAR_BYTES
from lowlat.serving.codec import ServingCodec
from lowlat.serving.engine import RuntimeEngine, sampling_params
from lowlat.text import TextCodec

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}{% if m.name is defined %} {{ m.name }}{% endif %}] {{ m.content }}\n"
    "{% endfor %}{% if shout is defined %}!{% endif %}{% if add_generation_prompt %}> {% endif %}"
)
# the edges of every range, and just beyond: both records must draw the line at the same place
EDGES: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0.0, 100.0], [-0.1, 100.1, float("nan")]),
    "top_k": ([0, (1 << 31) - 1], [-1, 1 << 31]),
    "top_p": ([1e-9, 1.0], [0.0, 1.1]),
    "min_p": ([0.0, 1.0], [-0.1, 1.1]),
    "repetition_penalty": ([0.1, 10.0], [0.0, 10.1]),
    "presence_penalty": ([-2.0, 2.0], [-2.1, 2.1]),
    "frequency_penalty": ([-2.0, 2.0], [-2.1, 2.1]),
    "logit_bias": (
        [{}, {0: 100.0}, dict.fromkeys(range(300), 0.0)],
        [{0: 100.1}, {-1: 0.0}, dict.fromkeys(range(301), 0.0)],
    ),
    "seed": ([0, (1 << 63) - 1], [-1, 1 << 63]),
    "stop_token_ids": ([(0,), tuple(range(16))], [(-1,), tuple(range(17)), (1 << 31,)]),
    "stop": ([("x",), ("x" * 1024,) * 16], [("",), ("x" * 1025,), ("x",) * 17]),
    "max_tokens": ([1, (1 << 31) - 1], [0, 1 << 31]),
    "min_tokens": ([0, 256], [-1]),
    "ignore_eos": ([True], [1, "yes"]),
    "logprobs": ([0, 20], [-1, 21]),
    "max_draft_tokens": ([0, 63], [-1, 64]),
    "json_schema": (["{}", "x" * MAX_GRAMMAR_BYTES], ["", "x" * (MAX_GRAMMAR_BYTES + 1), 1]),
    "json_object": ([True], [1, "yes"]),
    "regex": (["x", "x" * MAX_GRAMMAR_BYTES], ["", "x" * (MAX_GRAMMAR_BYTES + 1), 1]),
    "grammar": (["x", "x" * MAX_GRAMMAR_BYTES], ["", "x" * (MAX_GRAMMAR_BYTES + 1), 1]),
    "choice": ([("x",), ("x",) * MAX_CHOICES], [("",), ("x",) * (MAX_CHOICES + 1)]),
    "tool_calls": (["{}", "x" * MAX_GRAMMAR_BYTES], ["", "x" * (MAX_GRAMMAR_BYTES + 1), 1]),
    "parse": (["reasoning", "tools"], ["all", 1]),
    "tools": (["[]", "x" * MAX_GRAMMAR_BYTES], ["", "x" * (MAX_GRAMMAR_BYTES + 1), 1]),
    "prompt_logprobs": ([0, 20], [-1, 21]),
    "priority": ([-1000, 1000], [-1001, 1001]),
    "draft_texts": ([("x", (0, 1)), ("x",) * MAX_DRAFT_TEXTS], [("",), ((),), ((-1,),), ("x",) * 17, (1,)]),
}


def on_the_wire(**values: Any) -> Sampling:
    """Return the sampling options that the server reads from these fields."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(values), type=Sampling)


def test_both_records_have_the_same_fields_and_defaults() -> None:
    assert list(Sampling.__struct_fields__) == [field.name for field in fields(SamplingParams)] == list(EDGES)
    assert sampling_params(Sampling()) == SamplingParams()


@pytest.mark.parametrize("name", EDGES)
def test_both_records_have_the_same_ranges(name: str) -> None:
    inside, outside = EDGES[name]
    for value in inside:
        assert getattr(sampling_params(on_the_wire(**{name: value})), name) == value
    for value in outside:
        with pytest.raises(RequestError, match=name if name != "stop" else "stop"):
            SamplingParams(**{name: value})
        with pytest.raises((msgspec.MsgspecError, OverflowError)):
            on_the_wire(**{name: value})


def test_bounds_stand_in_the_wires_own_types() -> None:
    """Nothing of SUBMIT is left for the runtime to refuse but what depends on two fields or on the model."""
    bounded = {
        name
        for name, hint in get_type_hints(Sampling, include_extras=True).items()
        if any(get_origin(part) is Annotated for part in (hint, *get_args(hint)))
    }
    assert bounded == set(EDGES) - {"ignore_eos", "json_object", "parse"}
    with pytest.raises(RequestError, match="min_tokens must be at most max_tokens 4, got 5"):
        sampling_params(on_the_wire(max_tokens=4, min_tokens=5))


ROOM: dict[str, Any] = {"allow_special": False, "max_context": 1 << 20, "max_tokens": 1}


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("talker")
    stops = list(range(40, 57))
    vocabulary = byte_level().get_vocab_size()
    make_target(directory, "llama", vocab_size=vocabulary, num_hidden_layers=2, eos_token_id=stops)
    return write_directory(directory, byte_level(), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def engine(talker: Path) -> Iterator[RuntimeEngine]:
    """An engine that each test leaves without requests."""
    made = RuntimeEngine(Runtime.load(talker, max_batch=2, max_context=64, max_queue=1))
    yield made
    made.close()


def test_the_adapters_are_what_the_server_asks_for(engine: RuntimeEngine, talker: Path) -> None:
    asked: Engine = engine
    info = asked.info
    assert (info.model, info.max_running, info.max_context) == (talker.name, 2, 64)
    assert info.vocab_size == byte_level().get_vocab_size() and info.has_chat_template
    assert len(info.tokenizer) == 64 and not info.on_device and info.num_speculative_tokens == 0
    assert info.numerics == engine.stats()["numerics"] and re.fullmatch("[0-9a-f]{16}", info.numerics)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ((), Sampling(), "the prompt is empty"),
        ((1, -1), Sampling(), "prompt token 1 is -1; ids are integers from 0"),
        ((1, 10**6), Sampling(), "prompt token 1 is 1000000"),
        ((1, True), Sampling(), "prompt token 1 is True"),
        ((1, 2.0), Sampling(), "prompt token 1 is 2.0"),
        ((1,), Sampling(max_tokens=64), r"prompt of 1 tokens and max_tokens 64 exceed 64 \(max_context\)"),
        ((1,), Sampling(max_tokens=8, stop_token_ids=(10**6,)), "stop_token_ids: 1000000 is not a token id"),
        ((1,), Sampling(max_tokens=8, logit_bias={10**6: 1.0}), "logit_bias: 1000000 is not a token id"),
        ((1,), Sampling(max_tokens=8, stop_token_ids=tuple(range(10, 26))), "33 stop tokens, the model's own 17"),
        ((1,), Sampling(max_tokens=8, min_tokens=9), "min_tokens must be at most max_tokens 8"),
    ],
)
def test_what_validate_refuses_submit_refuses_in_the_same_words(
    engine: RuntimeEngine, prompt: tuple[int, ...], sampling: Sampling, message: str
) -> None:
    for ask in (engine.validate, lambda *arguments: engine.submit("r", *arguments)):
        with pytest.raises(RequestError, match=message):
            ask(prompt, sampling)
    assert not engine.busy


def test_a_worst_case_larger_than_the_pool_is_refused_before_it_is_queued(talker: Path) -> None:
    made = RuntimeEngine(Runtime.load(talker, max_batch=1, max_context=256, kv_blocks=3))
    made.validate((1, 2), Sampling(max_tokens=61))  # 63 tokens and a row of overhang: both blocks of 32, full
    with pytest.raises(RequestError, match=r"prompt of 2 tokens and max_tokens 62 exceed 63.*\(kv_blocks\)"):
        made.validate((1, 2), Sampling(max_tokens=62))
    made.submit("r", (1, 2), Sampling(max_tokens=61))
    made.close()


def test_a_request_runs_as_in_process_in_whichever_thread_steps(engine: RuntimeEngine, talker: Path) -> None:
    prompt, sampling = tuple(range(10, 20)), Sampling(max_tokens=12, temperature=0.8, seed=3, logprobs=1)
    with Runtime.load(talker, max_batch=1, max_context=64) as runtime:
        name = runtime.submit(prompt, sampling_params(sampling))
        expected = [token for _ in range(40) for output in runtime.step() for token in output.token_ids]
        seed = runtime.metrics(name).seed
    found: list[int] = []

    def decode() -> None:
        engine.submit("r", prompt, sampling)
        while engine.busy:
            for output in engine.step():
                found.extend(output.token_ids)
                assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)

    thread = threading.Thread(target=decode)
    thread.start()
    thread.join(60.0)
    assert found == expected
    metrics = engine.metrics("r")
    assert metrics["seed"] == seed == 3 and metrics["completion_tokens"] == len(expected)


def test_parsing_moves_text_and_no_token(engine: RuntimeEngine, talker: Path) -> None:
    """The prompt opens a thought, so that all that follows is reasoning."""
    prompt = TextCodec(byte_level()).encode("Q: a?\n<think>\n", add_special_tokens=False)
    found = {}
    for parse in ("none", "reasoning"):
        engine.submit(parse, prompt, Sampling(max_tokens=30, ignore_eos=True, seed=2, logprobs=1, parse=parse))
        outputs = []
        while engine.busy:
            outputs += engine.step()
        found[parse] = outputs
    plain, parsed = found["none"], found["reasoning"]
    text = "".join(output.text or "" for output in plain)
    assert [output.token_ids for output in plain] == [output.token_ids for output in parsed]
    assert text.strip() and "".join(output.reasoning for output in parsed) == text.strip()
    assert not any(output.text for output in parsed) and not any(output.reasoning for output in plain)
    texts = [one.texts for output in plain for one in output.logprobs or ()]
    assert b"".join(own[0] for own in texts if own is not None).decode("utf-8", "replace").strip() == text.strip()
    assert all(own is not None and len(own) == 2 for own in texts)


def test_templates_are_given_reasoning_and_roles_as_they_know_them(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.content }}{% endfor %}"
    )
    for template, role in ((source, "system"), (source + "{# developer #}", "developer")):
        own = TextCodec.load(write_directory(tmp_path, byte_level(), chat_template=template))
        assert own is not None
        asked = [Message("developer", "a", thinking="b")]
        ids = ServingCodec(own).encode_chat(asked, {}, allow_special=False, max_context=100, max_tokens=1)
        assert own.decode(ids) == f"[{role}]b|b|a"
        own.close()


TAKES_TOOLS = "{% for t in tools or [] %}<tool_call>{{ t.function.name }}{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.name }}{% endfor %}"
JOINS = "{% for m in messages %}[{{ m.role }}]{{ m.content + '.' }}" + CALLS + "{% endfor %}"
TESTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m['content'] is none %}" + CALLS + "{% else %}{{ m['content'] + '.' }}"
    "{% endif %}{% endfor %}"
)
ONE_OF_TWO = (
    "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "{{ m.thinking }}|{{ m.content }}|{{ m.tool_calls[0].name }}{% endfor %}"
)


BOTH = {"thinking": "t", "content": "c"}


@pytest.mark.parametrize(
    ("template", "cases"),
    [
        (JOINS, [({}, "[assistant].f")]),
        (TESTS, [({}, "[assistant]f"), ({"content": "x"}, "[assistant]x.")]),
        (ONE_OF_TWO, [({"thinking": "t"}, "t||f"), ({"content": "c"}, "|c|f"), (BOTH, "t\n\nc||f")]),
    ],
)
def test_messages_that_call_tools_fit_every_kind_of_template(
    template: str, cases: list[tuple[dict[str, str], str]]
) -> None:
    own = TextCodec(byte_level(), templates={"default": TAKES_TOOLS + template})
    for own_fields, text in cases:
        message = Message("assistant", tool_calls=[{"name": "f"}], **own_fields)
        ids = ServingCodec(own).encode_chat([message], {}, **ROOM)
        assert own.decode(ids) == text
    own.close()


def test_stats_say_who_has_a_slot_and_who_waits(engine: RuntimeEngine) -> None:
    for name in ("a", "b", "c"):
        engine.submit(name, (1, 2, 3), Sampling(max_tokens=20, ignore_eos=True))
    with pytest.raises(CapacityError, match="max_queue"):
        engine.submit("d", (1, 2, 3), Sampling(max_tokens=20))
    engine.step()
    engine.cancel("b")
    stats = engine.stats()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats)) == stats
    assert stats["max_slots"] == 2 and stats["num_queued"] == 1 and stats["num_live"] == 2
    (slot,) = stats["slots"]
    assert (slot["request_id"], slot["phase"], slot["prompt_tokens"], slot["max_tokens"]) == ("a", "decoding", 3, 20)
    assert slot["completion_tokens"] == 1 and stats["kv"]["num_used"] > 0
    assert [output.finish_reason for output in engine.step() if output.request_id == "b"] == ["cancelled"]
    with pytest.raises(RequestError, match="unknown or has ended"):
        engine.cancel("b")
    while engine.busy:
        engine.step()


def test_speculation_shows_in_stats_and_metrics(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "llama")
    speculative = SpeculativeConfig(model=pair.head, num_speculative_tokens=2, strict=True)
    made = RuntimeEngine(Runtime.load(pair.target, speculative, max_batch=1, max_context=64), "a name")
    assert made.info.num_speculative_tokens == 2 and made.info.model == "a name" and made.info.tokenizer == ""
    with pytest.raises(RequestError, match=r"stop strings need tokenizer.json"):
        made.validate((1,), Sampling(max_tokens=4, stop=("x",)))
    made.submit("r", (5, 6, 7), Sampling(max_tokens=20))
    while made.busy:
        made.step()
    assert made.metrics("r")["eagle_speculation"]["num_drafts"] > 0
    assert made.stats()["eagle_speculation"]["acceptance_by_position"]
    made.close()
    with pytest.raises(LowlatError, match="closed"):
        made.step()


@pytest.fixture(scope="module")
def codec(talker: Path) -> Iterator[ServingCodec]:
    from lowlat.text import TextCodec

    made = TextCodec.load(talker)
    assert made is not None
    yield ServingCodec(made)
    made.close()


def test_a_chat_goes_through_the_template_without_special_tokens(codec: ServingCodec) -> None:
    asked: Codec = codec
    bare = byte_level()
    chat = [Message(role="system", content="be kind"), Message(role="user", content="hi", name="Ann")]
    expected = "[system] be kind\n[user Ann] hi\n"
    for options, tail in (({}, "> "), ({"add_generation_prompt": False}, ""), ({"shout": True}, "!> ")):
        ids = asked.encode_chat(chat, options, **ROOM)
        assert list(ids) == bare.encode(expected + tail, add_special_tokens=False).ids


def test_text_gets_what_the_tokenizer_puts_around_it(codec: ServingCodec, talker: Path) -> None:
    from lowlat.text import TextCodec

    own = TextCodec.load(talker)
    assert own is not None
    assert codec.encode("hello", **ROOM) == own.encode("hello")
    own.close()


@pytest.mark.parametrize("name", ["allow_special", "self"])
def test_options_cannot_take_the_messages_place(codec: ServingCodec, name: str) -> None:
    with pytest.raises(RequestError, match=f"may not hold '{name}'"):
        codec.encode_chat([Message(role="user", content="hi")], {name: []}, **ROOM)
    with pytest.raises(RequestError, match="add_generation_prompt must be true or false"):
        codec.encode_chat([Message(role="user", content="hi")], {"add_generation_prompt": 1}, **ROOM)


def test_a_template_that_uses_too_much_fails_its_request_alone() -> None:
    from lowlat.text import TextCodec

    endless = "{% for a in range(10**7) %}{% for b in range(10**7) %}x{% endfor %}{% endfor %}"
    codec = TextCodec(byte_level(), templates={"default": endless})
    try:
        with pytest.raises(RequestError, match="the chat template"):
            ServingCodec(codec).encode_chat([Message(role="user", content="hi")], {}, **ROOM)
    finally:
        codec.close()
