"""More than eight slots: every request has the tokens that it has alone without drafts; what steps lack is refused."""

from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest
from recording import check_invariants
from rich.console import Console
from stages import later, wide
from tiny_models import PairPaths, make_pair

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.cli.commands.top import render
from lowlat.engine.loading.programs import bucket_batches
from lowlat.engine.scheduling.records import HeldUp
from lowlat.errors import ConfigError
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.slots import MOST_STEP_ROWS, fit_slots, most_drafts

SIZES: dict[str, Any] = {"max_context": 112, "block_size": 4, "prefill_chunk": 8, "device": "cpu", "dtype": "float32"}
MAX_TOKENS = 5
MODEL = Path("draft")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PairPaths]:
    return {family: make_pair(tmp_path_factory.mktemp(family), family) for family in ("llama", "gpt_oss")}


def answers(runtime: Runtime, count: int) -> tuple[list[list[int]], int]:
    """The first tokens of so many requests, and how many decoded at once, at most.

    Prompts end one after the other, and every request decodes until the last has its tokens.
    """
    tokens: dict[str, list[int]] = {}
    lasting = 1 if runtime.config.max_batch == 1 else 20
    for n in range(count):
        sampling = SamplingParams(max_tokens=MAX_TOKENS * lasting, seed=n, temperature=n % 2 / 2, ignore_eos=True)
        tokens[runtime.submit([3 + n, 5, 7, 5, 7], sampling)] = []
    most = 0
    while runtime.busy and any(len(each) < MAX_TOKENS for each in tokens.values()):
        for output in runtime.step():
            tokens[output.request_id] += output.token_ids
        most = max(most, runtime.scheduler.num_active)
    check_invariants(runtime)
    return [each[:MAX_TOKENS] for each in tokens.values()], most


@pytest.mark.parametrize(
    ("family", "slots", "speculation"),
    [
        ("llama", 16, {"num_speculative_tokens": 3}),
        later("llama", 32, {"num_speculative_tokens": "auto"}),
        wide("gpt_oss", 32, {"num_speculative_tokens": 3}),
    ],
)
def test_many_slots_have_the_tokens_of_one(
    family: str, slots: int, speculation: dict[str, Any], pairs: dict[str, PairPaths]
) -> None:
    """All decode at once; buckets stay few."""
    pair = pairs[family]
    with Runtime.load(pair.target, max_batch=1, **SIZES) as alone:
        expected, _ = answers(alone, slots)
    own = SpeculativeConfig(model=pair.head, strict=True, **speculation)
    with Runtime.load(pair.target, own, max_batch=slots, **SIZES) as runtime:
        found, most = answers(runtime, slots)
        stats = runtime.summary()["eagle_speculation"]
        assert most == slots and len(runtime.slots()) == slots and len(runtime.ladder.buckets) <= 24
        assert {bucket.batch * bucket.rows for bucket in runtime.ladder.buckets} <= set(range(MOST_STEP_ROWS + 1))
    assert found == expected and 0 < stats["total_accepted_tokens"] < stats["total_draft_tokens"]


def test_buckets_are_powers_of_two_up_to_the_largest() -> None:
    assert [bucket_batches(most) for most in (1, 3, 8, 12, 32)] == [
        [1], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12], [1, 2, 4, 8, 16, 32],
    ]  # fmt: skip


@pytest.mark.parametrize(("slots", "most"), [(1, 7), (8, 7), (9, 7), (16, 7), (17, 6), (24, 4), (32, 3)])
def test_chains_are_as_long_as_rows_last(slots: int, most: int) -> None:
    """Chosen lengths are cut, fixed ones refused by name."""
    chosen = fit_slots(SpeculativeConfig(MODEL, num_speculative_tokens="auto"), slots)
    assert most_drafts(slots) == most and chosen is not None and chosen.num_speculative_tokens == most
    longest = SpeculativeConfig(MODEL, num_speculative_tokens=7)
    if most == 7:
        assert fit_slots(longest, slots) is longest
        return
    message = rf"makes steps of {8 * slots} rows, .* lower num_speculative_tokens to {most}, or max_batch to 16"
    with pytest.raises(ConfigError, match=message):
        fit_slots(longest, slots)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tree": ((0,), (1,))}, "tree is not implemented for max_batch 9; leave it out, or lower max_batch to 8"),
        ({"dynamic_tree_max_topk": 2}, "dynamic_tree_max_topk is not implemented for max_batch 9"),
        ({"enable_specpv": True}, "enable_specpv is not implemented for max_batch 9"),
    ],
)
def test_other_steps_are_of_eight_slots(given: dict[str, Any], message: str) -> None:
    depth = 1 if "tree" in given else 3
    config = SpeculativeConfig(MODEL, num_speculative_tokens=depth, **given)
    assert fit_slots(config, 8) is config
    with pytest.raises(ConfigError, match=message):
        fit_slots(config, 9)


def test_runtimes_have_at_most_32_slots_and_several_gpus_eight() -> None:
    assert RuntimeConfig(max_batch=32).max_batch == 32
    with pytest.raises(ConfigError, match="max_batch"):
        RuntimeConfig(max_batch=33)
    with pytest.raises(ConfigError, match="max_batch 9 is not implemented for tensor_parallel_size 2"):
        RuntimeConfig(max_batch=9, tensor_parallel_size=2)


def test_top_shows_the_slots_that_are_taken() -> None:
    """Each free one of a few has a line, those of many have one."""
    taken = {"slot": 5, "phase": "decoding", "prompt_tokens": 7, "completion_tokens": 2, "max_tokens": 9}
    shown = []
    for num_slots in (8, 32):
        console = Console(width=100, file=StringIO())
        console.print(render({"num_slots": num_slots, "engine": {"slots": [taken]}}, "ipc:///x"))
        shown.append(cast(StringIO, console.file).getvalue())
    assert shown[0].count("free") == 7 and shown[0].count("decoding") == 1
    assert shown[1].count("free") == 1 and "31 free" in shown[1] and shown[1].count("decoding") == 1


def test_top_shows_who_waits_for_what_is_held_for_callers() -> None:
    console = Console(width=200, file=StringIO())
    held_up = HeldUp("r7", 9, 2, ("r1", "r2", "r3", "r4"), 12, ("r5",), 3, has_slot=True)
    console.print(render({"engine": {"held_up": {**asdict(held_up), "text": str(held_up)}}}, "ipc:///x"))
    shown = cast(StringIO, console.file).getvalue()
    assert "held up   request r7 waits, and nothing runs: it needs 9 KV blocks, and 2 are free or reusable" in shown
    assert "paused requests hold 12 (r1, r2, r3 and 1 more) and open prompts hold 3 (r5)" in " ".join(shown.split())
