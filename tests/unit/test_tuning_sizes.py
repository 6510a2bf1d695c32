"""`lowlat tune` lists every launch that a runtime of the same sizes makes."""

from pathlib import Path
from typing import Any

import pytest
from stages import later

from lowlat.engine.loading.geometry import make_geometry
from lowlat.engine.loading.programs import build_rank, make_ladder
from lowlat.engine.loading.speculation import make_topologies
from lowlat.kernels.attention.limits import choose_split, shortly_split
from lowlat.kernels.toolchain.kernel import H200
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.slots import fit_slots
from lowlat.options.speculative import SpeculativeConfig
from lowlat.tools.tune.pairs import LoweredPrograms, Pair, Sizes, random_pair, sizes_of
from lowlat.tools.tune.run import listed


def launched(pair: Pair, **options: Any) -> set[tuple[str, str]]:
    """Kind and key of each launch of a runtime's programs that a plan cuts."""
    speculative = fit_slots(SpeculativeConfig(model="a draft model", num_speculative_tokens=3), options["max_batch"])
    assert speculative is not None
    topologies = make_topologies(speculative, options["max_batch"])
    config = RuntimeConfig(dtype=pair.config.dtype, prompt_logprobs=False, **options)
    geometry = make_geometry(pair.config, pair.speculator, topologies, config, speculative)
    rank = build_rank(geometry, make_ladder(geometry, topologies, speculative), topologies)
    lowered = LoweredPrograms(pair, H200, (*rank.programs.values(), *rank.prefills.values()))
    calls = [call for each in lowered.programs for group in lowered.groups(each, H200) for call in group.kernel_calls]
    return {(call.planned.kind, call.planned.key) for call in calls if call.planned is not None}


@pytest.mark.parametrize(
    ("max_batches", "context", "forced_rows"),
    [((2,), 4096, 0), later((4,), 2048, 32), later((3, 32), 4096, 16)],
    ids=str,
)
def test_every_launch_of_a_runtime_is_listed(
    max_batches: tuple[int, ...], context: int, forced_rows: int, tmp_path: Path
) -> None:
    """Of steps of every bucket, of wide ones, of prompts; attention in the splits of that context."""
    pair, known = random_pair("llama-8b", tmp_path), list[set[tuple[str, str]]]()
    for rows in (forced_rows, 0):
        sizes = sizes_of(max_batches, Sizes(forced_rows=rows))
        known.append({shape.place for shape in listed([pair], "all", sizes, H200)})
    for max_batch in max_batches:
        found = launched(pair, max_batch=max_batch, max_context=context, forced_rows=forced_rows)
        assert found <= known[0], found - known[0]
        assert not forced_rows or not found <= known[1]


def test_a_runtime_s_sizes_are_those_of_all_of_its_steps() -> None:
    """Runtimes of few slots have launches in common; of many slots each has its own, and fewer drafts."""
    one, of_16, of_32 = sizes_of((32, 3, 1, 4, 16), Sizes(depths=(0, 3, 5, 7), max_context=2048))
    assert (one.batches, one.draft_lengths) == ((1, 2, 3, 4), (0, 3, 5, 7))
    assert (of_16.batches, of_16.draft_lengths) == ((1, 2, 4, 8, 16), (0, 3, 5, 7))
    assert (of_32.batches, of_32.draft_lengths) == ((1, 2, 4, 8, 16, 32), (0, 3))
    assert {each.max_context for each in (one, of_16, of_32)} == {2048}
    assert sizes_of((8,), Sizes()) == [Sizes()]


@pytest.mark.parametrize("kv_heads", [1, 3, 4, 8, 32])
@pytest.mark.parametrize("max_batch", [1, 4, 32])
def test_the_longest_context_of_short_splits_is_known(max_batch: int, kv_heads: int) -> None:
    most = shortly_split(max_batch, kv_heads)
    assert choose_split(max_batch, most + 1, kv_heads) == 512
    assert not most or choose_split(max_batch, most, kv_heads) < 512
