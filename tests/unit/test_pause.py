"""Requests that give their slot away go on with the tokens of one that ran on: whatever they keep, and where it lies."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_device import load_fake
from hypothesis import given, settings
from paused_requests import alone, moves, paused_each_step, play, random_moves
from recording import prompt_of, run_all
from stages import later
from tiny_grammars import Automaton, submit_with
from tiny_models import PairPaths, make_pair, make_target
from tiny_mtp import add_mtp
from unit.test_grammar_masks import FORKS, NARROW, WIDE
from unit.test_lossless import MODES
from unit.test_specpv import LOSSLESS, SPECPV

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.errors import CapacityError, RequestError

OPTIONS: dict[str, Any] = {"max_batch": 2, "max_context": 96, "block_size": 4, "prefill_chunk": 8} | {
    "dtype": "float32",
    "max_queue": 6,
}
CPU = {**OPTIONS, "device": "cpu"}
FEW = {"kv_blocks": 40}  # blocks: those of requests without a slot must leave the device
PROMPTS = [prompt_of(21), prompt_of(5, seed=1), [*prompt_of(16), 5, 7, 5, 7], prompt_of(30, seed=3)]
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "eagle3": {"num_speculative_tokens": 3},
    "eagle3+": {"num_speculative_tokens": 4, "adaptive_width": True},
    "tree": {"num_speculative_tokens": 2, "tree": ((0,), (1,), (0, 0), (0, 1), (1, 0))},
    "beside": {"num_speculative_tokens": 3, "text_drafts": "suffix"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
    "specpv": {"num_speculative_tokens": 3, **SPECPV},
    "lossless": {"num_speculative_tokens": 3, **SPECPV, **LOSSLESS},
}
CASES = [
    ("llama", "none", "sampled"),
    ("llama", "eagle3", "penalised"),
    later("llama", "eagle3+", "filtered"),
    later("llama", "tree", "sampled"),
    later("llama", "beside", "greedy"),
    ("gpt_oss", "eagle3", "sampled"),  # windows
    later("gpt_oss", "ngram", "filtered"),
    ("qwen3_5_text", "mtp", "sampled"),  # recurrent states
    later("qwen3_5_text", "ngram", "penalised"),
    later("llama", "specpv", "sampled"),
    ("llama", "lossless", "sampled"),
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PairPaths]:
    """A target and a draft model of each family; the hybrid has an MTP layer of its own."""
    found = {family: make_pair(tmp_path_factory.mktemp(family), family) for family in ("llama", "gpt_oss")}
    hybrid = tmp_path_factory.mktemp("hybrid")
    make_target(hybrid, "qwen3_5_text", gain=0.3)
    add_mtp(hybrid, copies=True)
    return {**found, "qwen3_5_text": replace(found["llama"], target=hybrid)}


def speculation(pair: PairPaths, method: str) -> SpeculativeConfig | None:
    own = METHODS[method]
    if not own:
        return None
    model = {} if own.get("method") in ("ngram", "mtp") else {"model": pair.head}
    return SpeculativeConfig(strict=True, **{**model, **own})


def sampling(mode: str, seed: int = 7, **others: Any) -> SamplingParams:
    return SamplingParams(**{"seed": seed, "max_tokens": 18, **MODES[mode], **others})


@pytest.mark.parametrize(("family", "method", "mode"), CASES)
@pytest.mark.parametrize("few", [False, pytest.param(True)])
def test_any_moves_change_no_token(
    family: str, method: str, mode: str, few: bool, pairs: dict[str, PairPaths]
) -> None:
    pair, config = pairs[family], speculation(pairs[family], method)
    requests = [(prompt, sampling(mode, seed=seed, max_tokens=34)) for seed, prompt in enumerate(PROMPTS)]
    with Runtime.load(pair.target, config, **CPU) as runtime:
        expected = alone(runtime, requests)
    options = {**CPU, **(FEW if few else {})}
    if few and family == "gpt_oss":
        options["prefix_reuse"] = False
    with Runtime.load(pair.target, config, **options) as runtime:
        paused = sum(play(runtime, random_moves(seed, 60), requests, expected) for seed in range(3))
        assert paused > 3
