"""Prompts of a hybrid that share a prefix go on from a snapshot of its recurrent states: same bits, few tokens read."""

from pathlib import Path
from typing import Any

import pytest
from recording import prompt_of, run_all
from tiny_models import make_target

from lowlat import Runtime, SamplingParams
from lowlat.sequence.recurrent import RecurrentState

CHUNK = 16
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_batch": 2,
    "max_context": 200,
    "block_size": 8,
    "prefill_chunk": CHUNK,
    "max_prefill_chunks": 4,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hybrid")
    make_target(directory, "qwen3_5_text", gain=0.5)
    return directory


def turns(runtime: Runtime, seed: int) -> list[tuple[list[int], int]]:
    """An agent's run: a system prompt, and turns that add an answer and a tool's result; tokens and tokens read."""
    prompt, found = prompt_of(4 * CHUNK + 3), []
    for turn in range(4):
        params = SamplingParams(max_tokens=7, temperature=0.8, seed=seed + turn)
        before = runtime.kvcache.stats().hit_tokens
        other = runtime.submit(prompt_of(20, seed=turn), params)  # a neighbour with nothing in common
        name = runtime.submit(prompt, params)
        tokens = run_all(runtime)
        runtime.kvcache.invariants()
        found.append((tokens[name] + tokens[other], len(prompt) - (runtime.kvcache.stats().hit_tokens - before)))
        prompt = [*prompt, *tokens[name], *prompt_of(9 + turn, seed=turn + 50)]
    return found


def test_a_turn_reads_what_is_new_and_has_the_tokens_of_a_cold_start(target: Path) -> None:
    with Runtime.load(target, prefix_reuse=False, **OPTIONS) as runtime:
        cold = turns(runtime, 5)
    with Runtime.load(target, **OPTIONS) as runtime:
        state = next(each for each in runtime.geometry.sequence_states if isinstance(each, RecurrentState))
        assert state.num_snapshots == 64  # as many a slot as are ever kept
        warm, again = turns(runtime, 5), turns(runtime, 5)
    assert [tokens for tokens, _ in warm] == [tokens for tokens, _ in again] == [tokens for tokens, _ in cold]
    new = [7 + 9 + turn for turn in range(3)]
    assert all(read <= added + CHUNK - 1 for (_, read), added in zip(warm[1:], new, strict=True))
    assert all(read <= CHUNK for _, read in again)


@pytest.mark.second
def test_without_memory_for_snapshots_all_is_read_and_said(target: Path) -> None:
    with Runtime.load(target, state_cache_gib=0.0, **OPTIONS) as runtime:
        assert [read for _, read in turns(runtime, 5)][:2] == [4 * CHUNK + 3, 4 * CHUNK + 3 + 16]
        assert runtime.summary()["kv"]["snapshots"][0]["num_snapshots"] == 0
