"""Kernels that `bench.micro` times alone: their names, their bytes, and the state that makes them do their work."""

from pathlib import Path
from typing import Any

import pytest
import torch
from benches import bench
from lowered import Pair
from lowering_cases import DEMO

from lowlat.errors import ConfigError, LowlatError
from lowlat.kernels.reference.speculation.accept import accept
from lowlat.kernels.toolchain.kernel import H200
from lowlat.speculators.tree.topology import TreeTopology


def test_kernels_are_named_by_what_they_do_and_read() -> None:
    entries = bench("micro_entries")
    groups = Pair(DEMO / "target", DEMO / "head").lower(3, 4).groups
    named = entries.groups_by_name(groups)
    assert sum(len(same) for same in named.values()) == sum(bool(group.kernel_calls) for group in groups)
    assert len(named) < len(groups) / 2 and all(len(name) < 200 for name in named)
    assert len(named["linear + rope + kv_write (qkv)"]) == len(named["attention"]) == 8  # the target's layers
    assert "attention #2" in named  # the draft model's, of other rows


def test_moe_layers_are_timed_with_the_experts_that_rows_choose() -> None:
    """One row reads its chosen experts and the shared one; every copy chooses for itself, and awaits the logits."""
    entries = bench("micro_moe")
    made = entries.moe_layers(entries.MoeSize("tiny", 12, 3, 128, 128), torch.device("cpu"), H200)
    assert [entry.conditions["rows"] for entry in made] == [1, 4] * 4
    one, four = made[:2]
    assert one.conditions["distinct_experts"] == 4 < four.conditions["distinct_experts"] <= 13
    assert one.moved_bytes == 4 * 3 * 128 * 128 * 2 + 13 * 128 * 2
    for entry in made:
        kernels = [call.kernel.name for copy in range(2) for call in entry.calls(copy)]
        assert len(kernels) == 4 and kernels[0].startswith("router_n128_e13_")
        assert all(name.endswith("_e13_shared") for name in kernels[1::2])


TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_acceptance_is_timed_on_drafts_that_agree(tree: list[list[int]] | None) -> None:
    entries, state = bench("micro_entries"), bench("micro_state")
    speculation: dict[str, Any] = {"num_speculative_tokens": 3} | ({} if tree is None else {"tree": tree})
    pair = Pair(DEMO / "target", DEMO / "head", **speculation)
    lowered = pair.lower(3, 4)
    buffers, topology = lowered.buffers, pair.topologies[3]
    assert isinstance(topology, TreeTopology)
    buffers["tree_paths"].fill_(-1)
    for number, path in enumerate(topology.paths):
        buffers["tree_paths"][:, number, : len(path)] = torch.tensor(path, dtype=torch.int32)
    buffers["lengths"].fill_(20)
    drafts = state.drafts_of_slots(4, 3)
    state.agree(buffers, buffers, drafts)
    named = entries.groups_by_name(lowered.groups)
    group = next(groups[0] for name, groups in named.items() if name.startswith("accept "))
    (op,) = (op for op in group.ops if op.kind == "accept")
    accept(**op.arguments(buffers))
    assert buffers["accepted_lens"].tolist() == [1, 2, 3, 4] == [count + 1 for count in drafts]
    taken = [[node for node in row if node >= 0] for row in buffers["accepted_nodes"].tolist()]
    moved = sum(node != place for row in taken for place, node in enumerate(row))
    assert state.copied_positions(buffers, drafts) == moved and (moved > 0) == (tree is not None)
    with pytest.raises(ValueError, match="no path has 4 drafts"):
        state.agree(buffers, buffers, [4, 0, 0, 0])
    specs, rows = lowered.program.buffers, topology.num_nodes
    without, with_moves = (state.buffer_bytes(group, specs, 4, rows, moved=each) for each in (0, moved))
    caches = sum(spec.shape[1] * spec.shape[3] * 2 for name, spec in specs.items() if name[1:].startswith("_cache"))
    copies = any(op.kind == "kv_compact" for op in group.ops)
    assert with_moves - without == (2 * moved * caches if copies else 0) and copies == (tree is not None)
    assert 1000 < without < 20000
    packing = next(groups[0] for name, groups in named.items() if name.startswith("tree_masks"))
    masks = specs["tree_masks"]
    assert state.buffer_bytes(packing, specs, 4, rows) > masks.shape[1] * 8 * 4


def test_a_file_of_kernels_needs_those_of_the_cycle(tmp_path: Path) -> None:
    entries = bench("micro_entries")
    chain = ["apply_commands + list_active_slots + gather_rows", "accept + truncate + commit", "tree_masks + publish"]
    tree = ["tree: accept + truncate + kv_compact + commit", "tree: tree_masks + publish"]
    entries.check_needed([*chain, *tree])
    with pytest.raises(LowlatError, match="acceptance of a tree, compaction of keys and values, packing of a tree"):
        entries.check_needed(chain)
    with pytest.raises(LowlatError, match="no entry for acceptance:"):
        entries.check_needed([chain[0], "accept_simulated + truncate + commit", chain[2], *tree])
    with pytest.raises(ConfigError, match="there is none"):
        bench("micro").main(["--out", str(tmp_path / "micro.json")])
