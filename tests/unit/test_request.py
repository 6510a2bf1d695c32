"""Sampling parameters: every bound from both sides, every wrong type, and messages that name the parameter."""

import dataclasses
import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowlat.errors import RequestError
from lowlat.options import request as module
from lowlat.options.request import SamplingParams, StepOutput, TokenLogprobs

INT32 = (1 << 31) - 1
INT_BOUNDS = {
    "top_k": (0, INT32),
    "seed": (0, (1 << 63) - 1),
    "max_tokens": (1, INT32),
    "min_tokens": (0, 256),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "max_draft_tokens": (0, 63),
    "priority": (-1000, 1000),
}
FLOAT_BOUNDS = {
    "temperature": (0.0, 100.0),
    "top_p": (math.ulp(0.0), 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (math.ulp(0.0), 10.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
NO_INT: list[Any] = [True, False, 1.0, "1", [1], math.nan, b"1"]
NO_FLOAT: list[Any] = [True, False, "0.5", math.nan, math.inf, -math.inf, [0.5], 1j]


def made(**options: Any) -> SamplingParams:
    """Untyped on purpose: wrong types are what is tested."""
    return SamplingParams(**options)


def refused(match: str, **options: Any) -> None:
    with pytest.raises(RequestError, match=match):
        SamplingParams(**options)


def test_defaults_are_valid_and_greedy() -> None:
    params = SamplingParams()
    assert (params.temperature, params.stop, params.stop_token_ids, params.logit_bias) == (0.0, (), (), None)
    assert SamplingParams.from_options({}) == params


def test_every_parameter_is_covered_here() -> None:
    others = {"logit_bias", "stop_token_ids", "stop", "ignore_eos", "parse", "tools", "draft_texts"}
    covered = {*INT_BOUNDS, *FLOAT_BOUNDS, *others, *module.GRAMMAR_OPTIONS}  # the last in test_grammar_compiler.py
    assert {item.name for item in dataclasses.fields(SamplingParams)} == covered


def test_tools_are_json() -> None:
    tools = [{"name": "f", "parameters": {"type": "object"}}]
    assert made(tools=tools).tools == made(tools=json.dumps(tools)).tools == json.dumps(tools)
    for wrong in (3, {1, 2}, "", "x" * (module.MAX_GRAMMAR_BYTES + 1)):
        refused("tools must be a list", tools=wrong)
    refused("tools must be of JSON values", tools=[{"name": {1}}])


def test_texts_to_draft_from_are_texts_or_token_ids() -> None:
    assert made(draft_texts="one text").draft_texts == ("one text",)
    assert made(draft_texts=["a", [1, 2]]).draft_texts == ("a", (1, 2))
    assert made(draft_texts=("a",) * module.MAX_DRAFT_TEXTS).draft_texts == ("a",) * module.MAX_DRAFT_TEXTS
    refused("draft_texts holds 17 texts; at most 16", draft_texts=["a"] * 17)
    wrong: list[tuple[str, Any]] = [
        *(("a text must have 1 to", each) for each in ("", [""], [()], ["x" * (module.MAX_DRAFT_TEXT_CHARACTERS + 1)])),
        *(("must be a sequence", each) for each in (3, [3], [None], [{"a": 1}])),
        *(("must be", each) for each in ([[-1]], [[1.0]], [[True]])),
    ]
    for message, texts in wrong:
        refused(f"^draft_texts:? {message}", draft_texts=texts)


@pytest.mark.parametrize("name", INT_BOUNDS)
def test_integer_bounds(name: str) -> None:
    low, high = INT_BOUNDS[name]
    for value in (low, high):
        assert getattr(made(**{name: value}), name) == value
    refused(rf"^{name} must be from {low} to \d+, got {low - 1}$", **{name: low - 1})
    refused(rf"^{name} must be .*{high}, got {high + 1}$", **{name: high + 1})
    refused(rf"^{name} must be from .*got an integer of 33220 bits$", **{name: 10**10_000})
    for wrong in NO_INT:
        refused(rf"^{name} must be an integer, got {re.escape(repr(wrong))}$", **{name: wrong})


@pytest.mark.parametrize("name", FLOAT_BOUNDS)
def test_float_bounds(name: str) -> None:
    low, high = FLOAT_BOUNDS[name]
    for value in (low, high, int(high), (low + high) / 2):
        assert getattr(made(**{name: value}), name) == value
    for value in (math.nextafter(low, -math.inf), math.nextafter(high, math.inf), -1e308, 1e308):
        refused(rf"^{name} must be (from|above) .*{high}, got ", **{name: value})
    refused(rf"^{name} must be .*got an integer of 33220 bits$", **{name: 10**10_000})
    for wrong in NO_FLOAT:
        refused(rf"^{name} must be a finite number, got {re.escape(repr(wrong))}$", **{name: wrong})


@pytest.mark.parametrize("name", [*INT_BOUNDS, *FLOAT_BOUNDS])
def test_none_is_for_options_only(name: str) -> None:
    if name in ("seed", "logprobs", "prompt_logprobs", "max_draft_tokens"):
        assert getattr(made(**{name: None}), name) is None
    else:
        refused(f"^{name} must be .*got None", **{name: None})


def test_min_tokens_is_bounded_by_max_tokens() -> None:
    assert SamplingParams(max_tokens=5, min_tokens=5).min_tokens == 5
    refused("^min_tokens must be at most max_tokens 5, got 6$", max_tokens=5, min_tokens=6)


@pytest.mark.parametrize("value", [0, 1, "yes", None])
def test_ignore_eos_is_a_bool(value: Any) -> None:
    assert SamplingParams(ignore_eos=True).ignore_eos
    refused(f"^ignore_eos must be true or false, got {value!r}$", ignore_eos=value)


def test_stop_token_ids() -> None:
    given_ids: Any = [3, 0, INT32]
    assert SamplingParams(stop_token_ids=given_ids).stop_token_ids == (3, 0, INT32)
    assert len(SamplingParams(stop_token_ids=tuple(range(16))).stop_token_ids) == 16
    refused("^stop_token_ids holds 17 ids; at most 16$", stop_token_ids=tuple(range(17)))
    refused(f"^stop_token_ids must be from 0 to {INT32}, got -1$", stop_token_ids=(-1,))
    refused(f"^stop_token_ids must be from 0 to {INT32}, got {INT32 + 1}$", stop_token_ids=(INT32 + 1,))
    for value in ("12", 5, None, {1: 2}, b"1"):
        refused(f"^stop_token_ids must be a sequence, got {type(value).__name__}$", stop_token_ids=value)
    for wrong in (True, "1", 1.0):
        refused(f"^stop_token_ids must be an integer, got {wrong!r}$", stop_token_ids=(wrong,))


def test_stop_strings() -> None:
    one: Any = "\n\n"
    assert SamplingParams(stop=one).stop == ("\n\n",)
    assert SamplingParams(stop=("x" * 1024,) * 16).stop == ("x" * 1024,) * 16
    refused("^stop holds 17 strings; at most 16$", stop=("x",) * 17)
    for value in ("", "x" * 1025, 5, None, b"x", 10**10_000):
        refused("^stop strings must have 1 to 1024 characters, got ", stop=("a", value))
    for value in (5, None, b"x"):
        refused(f"^stop must be a sequence, got {type(value).__name__}$", stop=value)
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop=("secret" * 1000,))
    assert len(str(caught.value)) < 200  # a long value is cut


def test_logit_bias() -> None:
    bias: Any = {0: -100, INT32: 100.0, 5: 0.5}
    params = SamplingParams(logit_bias=bias)
    assert params.logit_bias == bias
    bias[7] = math.nan
    assert params.logit_bias is not None and 7 not in params.logit_bias  # checked once, so not shared
    assert SamplingParams(logit_bias={}).logit_bias == {}
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(300), 1.0)).logit_bias or ()) == 300
    refused("^logit_bias holds 301 entries; at most 300$", logit_bias=dict.fromkeys(range(301), 1.0))
    refused(f"^logit_bias token must be from 0 to {INT32}, got -1$", logit_bias={-1: 0.0})
    for key in ("5", True, 5.0):
        refused(f"^logit_bias token must be an integer, got {key!r}$", logit_bias={key: 0.0})
    for value in (-100.5, 101):
        refused(rf"^logit_bias\[5\] must be from -100.0 to 100.0, got {value}$", logit_bias={5: value})
    for wrong in (math.nan, math.inf, "1", True, None):
        refused(rf"^logit_bias\[5\] must be a finite number, got {wrong!r}$", logit_bias={5: wrong})
    for kind in ([(1, 2.0)], "x", 5):
        refused(f"^logit_bias must map token ids to numbers, got {type(kind).__name__}$", logit_bias=kind)


def test_unknown_names_are_refused_by_name() -> None:
    with pytest.raises(
        RequestError,
        match=r"^unknown sampling parameter 'temprature'; did you mean 'temperature'\?; known: .*temperature",
    ):
        SamplingParams.from_options({"top_k": 1, "temprature": 0.5})
    assert SamplingParams.from_options({"temperature": 0.5, "stop": ["a"]}).stop == ("a",)
    with pytest.raises(RequestError, match=r"^top_p must be"):
        SamplingParams.from_options({"top_p": 0.0})


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers()),
    st.dictionaries(st.integers(), st.floats(), max_size=3), st.binary(max_size=3),
)  # fmt: skip


@given(st.dictionaries(st.sampled_from([item.name for item in dataclasses.fields(SamplingParams)]), ANYTHING))
def test_anything_is_taken_or_refused(options: dict[str, Any]) -> None:
    try:
        params = SamplingParams.from_options(options)
    except RequestError as error:
        assert any(name in str(error) for name in options)
        return
    assert 0 <= params.min_tokens <= params.max_tokens
    assert math.isfinite(params.temperature) and 0 < params.top_p <= 1
    assert SamplingParams.from_options(dataclasses.asdict(params)) == params


def test_outputs_are_frozen() -> None:
    output = StepOutput("r", (1, 2), logprobs=(TokenLogprobs(1, -0.5, ((1, -0.5),)),))
    assert (output.finish_reason, output.text, output.simulated) == (None, None, False)
    for frozen, name in ((output, "text"), (SamplingParams(), "seed")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, name, None)
