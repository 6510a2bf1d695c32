"""Tiles that attention walks, counted over a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from recording import prompt_of, run_all
from tiny_models import PairPaths, make_pair

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.engine.figures.tile_counter import TileCounter, VerifiedRows
from lowlat.errors import ConfigError

SIZES: dict[str, Any] = {"max_batch": 2, "max_context": 512, "block_size": 16, "prefill_chunk": 64, "device": "cpu"}
LAYERS, HEADS, TILE = 2, 2, 64


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    return make_pair(tmp_path_factory.mktemp("pair"), "llama", head_dim=64)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers with windows of 16 next to full ones."""
    return make_pair(tmp_path_factory.mktemp("windowed"), "gpt_oss", head_dim=64).target


def run(runtime: Runtime, prompts: Sequence[int], max_tokens: int) -> dict[str, Any]:
    for number, length in enumerate(prompts):
        runtime.submit(prompt_of(length, number), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    run_all(runtime)
    found: dict[str, Any] = runtime.summary()["attention_tiles"]
    return found


def test_a_run_counts_its_steps_tiles(pair: PairPaths) -> None:
    """Each step of one token walks the tiles of the positions up to its own, once a layer and key-value head."""
    with Runtime.load(pair.target, count_tiles=True, **SIZES) as runtime:
        found = run(runtime, [150], 60)["full"]
    starts = range(150, 150 + 59)  # of the token that each step reads, after a first one that is no step's
    full = sum(start // TILE for start in starts)
    assert found == {"layers": LAYERS, "steps": 59} | {
        name: LAYERS * HEADS * count
        for name, count in (("tiles", full + 59), ("full", full), ("masked", 59), ("empty", 0))
    }


def test_layers_of_each_kind_have_their_own(windowed: Path) -> None:
    with Runtime.load(windowed, count_tiles=True, **SIZES) as runtime:
        found = run(runtime, [200], 8)
    assert found.keys() == {"full", "window_16"}
    assert found["full"]["layers"] == found["window_16"]["layers"] == 1
    assert found["full"]["full"] == found["full"]["layers"] * HEADS * 7 * 3
    assert found["window_16"]["full"] == 0 < found["window_16"]["masked"]


@pytest.mark.parametrize("way", [{"num_speculative_tokens": 2, "tree": ((0,), (1,), (0, 0))}, {"auto": True}])
def test_drafts_are_counted_with_the_rows_that_were_verified(
    way: dict[str, Any], pair: PairPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that are counted are those that the programs had: their masks, by slot, of every decode step."""
    way = {"num_speculative_tokens": "auto"} if way.get("auto") else way
    counted: list[list[int]] = []
    masks_of = TileCounter._masks_of

    def masks(self: TileCounter, depth: int, slot: VerifiedRows, rows: int) -> list[int]:
        counted.append(masks_of(self, depth, slot, rows))
        return counted[-1]

    monkeypatch.setattr(TileCounter, "_masks_of", masks)
    verified: list[list[int]] = []

    config = SpeculativeConfig(model=pair.head, strict=True, **way)
    with Runtime.load(pair.target, config, count_tiles=True, **SIZES) as runtime:

        def seen(op: Any, arrays: Any) -> None:
            if op.kind == "sample" and arrays["row_masks"].shape[0] == len(live := arrays["slots"].tolist()):
                joins = [slot for slot in live if slot >= 0 and arrays["lengths"][slot] in (70, 130)]
                rows = [arrays["row_masks"][index].tolist() for index, slot in enumerate(live) if slot >= 0]
                verified.extend([] if joins else rows)

        runtime.executor.set_hook(seen)
        found = run(runtime, [70, 130], 20)["full"]
    width = max(map(len, verified))
    assert [row + [0] * (width - len(row)) for row in counted] == [row + [0] * (width - len(row)) for row in verified]
    assert found["full"] + found["masked"] + found["empty"] == found["tiles"] > found["full"] > 0


@pytest.mark.parametrize(
    ("speculation", "told"),
    [
        ({"dynamic_tree_max_topk": 2, "max_total_draft_tokens": 7}, "dynamic_tree_max_topk makes a dynamic one"),
        (
            {"enable_specpv": True, "specpv_n_retrieval_blocks": 4, "specpv_partial_threshold": 0},
            "enable_specpv attends to a part of it",
        ),
    ],
)
def test_what_cannot_be_counted_is_refused(speculation: dict[str, Any], told: str, pair: PairPaths) -> None:
    config = SpeculativeConfig(model=pair.head, num_speculative_tokens=3, strict=True, **speculation)
    with pytest.raises(ConfigError, match=told):
        Runtime.load(pair.target, config, count_tiles=True, **SIZES)


def test_heads_without_tiles_are_refused(tmp_path: Path) -> None:
    small = make_pair(tmp_path, "llama").target
    with pytest.raises(
        ConfigError, match="counts the tiles of heads of 64, 128, 256, 512, and the target has some of 8"
    ):
        Runtime.load(small, count_tiles=True, **SIZES)
    with Runtime.load(small, **SIZES) as runtime:
        assert "attention_tiles" not in runtime.summary()
