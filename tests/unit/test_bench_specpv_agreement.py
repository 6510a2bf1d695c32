"""SpecPV's tokens and distributions next to full attention's: where all is listed nothing differs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benches import bench
from recording import prompt_of
from tiny_models import PairPaths, make_pair

from lowlat import Runtime, SamplingParams, SpeculativeConfig

agreement = bench("experiments.specpv_agreement")
SPECPV: dict[str, Any] = {
    "enable_specpv": True,
    "specpv_block_size": 2,
    "specpv_n_sink_blocks": 1,
    "specpv_n_window_blocks": 2,
    "specpv_n_spec_tokens_buf": 16,
    "specpv_partial_threshold": 0,
}
PARAMS = SamplingParams(max_tokens=16, seed=1, temperature=0.7, ignore_eos=True)
PROMPT, OTHER = prompt_of(50, seed=1), prompt_of(16, seed=2)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    return make_pair(tmp_path_factory.mktemp("pair"), "llama")


def load(pair: PairPaths, blocks: int | None = None) -> Runtime:
    """A runtime of full attention, or one with so many blocks that each head chooses."""
    own: dict[str, Any] = {} if blocks is None else {**SPECPV, "specpv_n_retrieval_blocks": blocks}
    config = SpeculativeConfig(model=pair.head, num_speculative_tokens=3, strict=True, **own)
    options: dict[str, Any] = {
        "max_batch": 1,
        "max_context": 96,
        "block_size": 4,
        "prefill_chunk": 8,
        "dtype": "float32",
    }
    return Runtime.load(pair.target, config, device="cpu", executor="reference", **options)


@pytest.fixture(scope="module")
def whole(pair: PairPaths) -> Iterator[Runtime]:
    with load(pair) as runtime:
        yield runtime


def test_a_request_that_is_led_along_a_text_takes_it_and_along_its_own_has_the_bits_of_its_draws(
    whole: Runtime,
) -> None:
    free = agreement.draw(whole, PROMPT, PARAMS)
    led = agreement.draw(whole, PROMPT, PARAMS, free.tokens)
    assert led.tokens == free.tokens and len(free.logits) == 15 and free.drafts > 0 == led.drafts
    assert torch.equal(torch.stack(led.logits), torch.stack(free.logits))
    assert agreement.draw(whole, PROMPT, PARAMS, OTHER).tokens[1:] == OTHER[1:] != free.tokens[1:]
    assert agreement.draw(whole, PROMPT, PARAMS).tokens == free.tokens


@pytest.mark.second
def test_a_budget_of_the_whole_context_differs_nowhere_and_a_small_one_does(pair: PairPaths, whole: Runtime) -> None:
    full = agreement.draw(whole, PROMPT, PARAMS)
    found = {}
    for blocks in (30, 1):
        with load(pair, blocks) as runtime:
            budget = agreement.Budget({"specpv_n_retrieval_blocks": blocks}, runtime)
            budget.add(PROMPT, PARAMS, full, whole)
            found[blocks] = budget.row()
            assert budget.found == [] and budget.sums.count == 0
    every, few = found[30], found[1]
    assert (every["listed_positions"], every["partial_steps"], every["places"]) == (66, 0, 15)
    assert (every["equal_share"], every["first_difference"], every["same_choice"]) == (1.0, [None], 1.0)
    assert (every["mean_kl"], every["p99_kl"], every["max_kl"], every["texts_equal"]) == (0.0, 0.0, 0.0, 1)
    assert few["listed_positions"] == 8 and few["partial_steps"] > 3
    assert 0 < few["mean_kl"] < few["p99_kl"] <= few["max_kl"]


def test_tokens_agree_by_place() -> None:
    assert agreement.agreement([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]]) == (0.875, [2, None])


@pytest.mark.wide
def test_rows_are_contexts_and_budgets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    sizes = ["--context", "328", "248", "--retrieval", "1", "8", "--limit", "1", "--max-tokens", "8", "--device", "cpu"]
    assert bench("experiments.specpv").main(["agreement", *sizes, "--out", str(out), "--commit", "c0ffee1"]) == 0
    found = json.loads(out.read_text())
    assert found["conditions"]["commit"] == "c0ffee1" and found["left_out"] == []
    assert [(row["context"], row["listed_positions"]) for row in found["rows"]] == [
        *((248, 176), (248, 288)),
        *((328, 176), (328, 288)),
    ]
    few, every = found["rows"][:2]
    assert few["partial_steps"] > 0 == every["partial_steps"] and every["equal_share"] == 1.0 and every["mean_kl"] == 0
    assert (few["lossy"], few["simulated"], few["places"]) == (True, False, 7) and found["rows"][3]["mean_kl"] > 0
    assert capsys.readouterr().out.splitlines()[-3].startswith("| bundled | 248 | 176 |")
