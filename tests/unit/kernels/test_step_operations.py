"""The integer part of a step: rows, acceptance, truncation, commit, masks, publication."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import Arrays, meant, poisoned
from stages import wide

from lowlat.errors import DeviceError
from lowlat.kernels.reference import OPERATIONS
from lowlat.kernels.reference.speculation.accept import FINISH_ERROR, FINISH_LENGTH, FINISH_STOP
from lowlat.kernels.reference.step.publish import ACCEPTED, COMMITTED, FINISH, RECORD_WIDTH, SLOT, VERIFIED_SOURCE
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, HAS_GRAMMAR, MAX_LENGTH, NUM_INTS
from lowlat.kernels.reference.step.slots import FORCED_DRAFTS, FROM_TEXT
from lowlat.options.acceptance import expected_accept_length
from lowlat.speculators.tree.topology import TreeTopology

TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


def ints(*values: object) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def flags(*values: object) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.uint8)


def pad_paths(topology: TreeTopology, width: int, count: int) -> torch.Tensor:
    rows = [[*path, *[-1] * (width - len(path))] for path in topology.paths]
    rows += [[-1] * width] * (count - len(rows))
    return torch.tensor(rows, dtype=torch.int32)


def test_active_slots_are_listed_in_order() -> None:
    found = meant("list_active_slots", {"active": ints(0, 1, 0, 1, 1, 0)}, B=4)
    assert found["slots"].tolist() == [1, 3, 4, -1]


def run_accept(
    topology: TreeTopology, targets: list[int], drafts: list[int], live: int
) -> tuple[list[int], list[int], int]:
    paths = pad_paths(topology, topology.depth + 1, len(topology.paths))
    dead = (paths >= live) | (paths < 0)
    paths = torch.where(dead.cumsum(-1) > 0, -1, paths)
    arrays = {"target_tokens": ints(targets), "draft_tokens": ints(drafts), "paths": paths[None], "slots": ints(0)}
    outs = meant("accept", arrays)
    count = int(outs["accepted_lens"])
    assert outs["accepted_tokens"][0, count:].eq(-1).all()
    return outs["accepted_tokens"][0, :count].tolist(), outs["accepted_nodes"][0, :count].tolist(), count


@given(data=st.data())
def test_acceptance_is_the_greedy_walk(data: st.DataObject) -> None:
    """Against the walk itself: from the root, while some live child equals the draw."""
    topology = TreeTopology.from_choices(TREE)
    rows = topology.num_nodes
    targets = data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    live = data.draw(st.integers(1, rows))
    drafts = [9] * rows
    for parent in range(rows):  # siblings draft distinct tokens
        children = [n for n in range(rows) if topology.parents[n] == parent]
        for child, token in zip(children, data.draw(st.permutations(range(4))), strict=False):
            drafts[child] = token
    walk = [0]
    while True:
        nexts = [n for n in range(1, live) if topology.parents[n] == walk[-1] and drafts[n] == targets[walk[-1]]]
        if not nexts:
            break
        walk.append(nexts[0])
    tokens, nodes, count = run_accept(topology, targets, drafts, live)
    assert nodes == walk
    assert tokens == [targets[node] for node in walk]
    assert 1 <= count <= topology.depth + 1


def test_a_dead_slot_accepts_nothing() -> None:
    arrays = {"target_tokens": ints([1, 2]), "draft_tokens": ints([1, 2]), "paths": ints([[0, 1]]), "slots": ints(-1)}
    outs = meant("accept", arrays)
    assert outs["accepted_lens"].tolist() == [0]
    assert outs["accepted_tokens"].tolist() == [[-1, -1]]
    assert outs["best_path"].tolist() == [-1]


@pytest.mark.parametrize(("probability", "mean"), [wide(0.0, 1.0), (0.607, 2.2), wide(0.75, 2.734), wide(1.0, 4.0)])
def test_simulated_acceptance_has_the_mean_asked_for(probability: float, mean: float) -> None:
    total, rounds = 0, 1200
    for position in range(rounds):
        count = simulate_acceptance(probability, position, 3)
        total += count
    assert abs(total / rounds - mean) < 0.1
    assert abs(expected_accept_length(probability, 3) - mean) < 0.001


@pytest.mark.second
def test_a_shorter_run_of_drafts_accepts_those_of_the_longer_one() -> None:
    for position in range(40):
        longest = simulate_acceptance(0.7, position, 7)
        assert [simulate_acceptance(0.7, position, depth) for depth in range(8)] == [
            min(longest, depth + 1) for depth in range(8)
        ]
        for skipped in range(1, longest):  # nor does it matter where a step began
            assert simulate_acceptance(0.7, position + skipped, 7) >= longest - skipped


def simulate_acceptance(probability: float, position: int, depth: int) -> int:
    """Tokens that a step of a chain accepts after so many committed ones."""
    nodes = [*range(depth + 1)]
    arrays = {"target_tokens": ints([node + 50 for node in nodes]), "draft_tokens": ints(nodes), "paths": ints([nodes])}
    state = {"slots": ints(0), "lengths": ints(position), "probability": probability, "seed": 3}
    outs = meant("accept_simulated", {**arrays, **state})
    count = int(outs["accepted_lens"])
    assert outs["accepted_tokens"][0, :count].tolist() == [*range(1, count), 50 + count - 1]
    return count


@pytest.mark.parametrize(
    ("tokens", "finite", "limits", "stops", "expected"),
    [
        ([5, 6, 7], [1, 1, 1], (10, 100), [], (3, 0)),
        ([5, 6, 7], [1, 1, 1], (10, 100), [6], (2, FINISH_STOP)),
        ([5, 6, 7], [1, 1, 1], (10, 100), [7], (3, FINISH_STOP)),
        ([5, 6, 7], [1, 1, 1], (10, 12), [], (2, FINISH_LENGTH)),
        ([5, 6, 7], [1, 1, 1], (10, 12), [6], (2, FINISH_STOP)),
        ([5, 6, 7], [1, 1, 1], (10, 12), [7], (2, FINISH_LENGTH)),
        ([5, 6, 7], [1, 0, 1], (10, 100), [], (1, FINISH_ERROR)),
        ([5, 6, 7], [0, 1, 1], (10, 100), [], (0, FINISH_ERROR)),
        ([5, 6, 7], [1, 0, 1], (10, 100), [5], (1, FINISH_STOP)),
        ([5], [1], (10, 11), [], (1, FINISH_LENGTH)),
    ],
)
def test_truncation_order(
    tokens: list[int], finite: list[int], limits: tuple[int, int], stops: list[int], expected: tuple[int, int]
) -> None:
    record, count = torch.zeros(1, NUM_INTS, dtype=torch.int64), len(tokens)
    record[0, MAX_LENGTH] = limits[1]
    arrays = {"accepted_tokens": ints(tokens), "accepted_nodes": ints([*range(count)]), "accepted_lens": ints(count)}
    arrays |= {"finite": flags(finite), "slots": ints(0), "lengths": ints(limits[0]), "slot_ints": record}
    outs = meant("truncate", {**arrays, "stop_ids": ints([*stops, -1])})
    assert (int(outs["commit_lens"]), int(outs["finish"])) == expected


def test_commit_moves_lengths_and_ends_slots() -> None:
    tokens = torch.zeros(3, 10, dtype=torch.int32)
    lengths, active, drafts = ints(4, 2, 6), ints(1, 1, 1), ints(3, 3, 3)
    counts = torch.zeros(3, 12, dtype=torch.int32)
    arrays = {"accepted_tokens": ints([8, 8, 9], [7, -1, -1]), "commit_lens": ints(3, 1), "slots": ints(2, 0)}
    arrays |= {"finish": ints(0, FINISH_LENGTH), "tokens": tokens, "lengths": lengths, "active": active}
    outs = meant("commit", {**arrays, "output_counts": counts, "num_drafts": drafts})
    assert lengths.tolist() == [5, 2, 9]
    assert active.tolist() == [0, 1, 1]
    assert drafts.tolist() == [0, 3, 0]
    assert tokens[2, 6:9].tolist() == [8, 8, 9]
    assert tokens[0, 4] == 7
    assert counts[2, 8] == 2
    assert counts.sum() == 4
    assert outs["draft_live"].tolist() == [1, 0]
    assert outs["draft_lens"].tolist() == [9, 0]


def gather(topology: TreeTopology, bucket_rows: int, drafted: int, limit: int, room: int) -> Arrays:
    state_rows, width, count = 8, topology.depth + 1, len(topology.paths)
    record = torch.zeros(2, NUM_INTS, dtype=torch.int64)
    record[:, MAX_LENGTH] = 5 + room
    record[:, DRAFT_LIMIT] = limit
    drafts = torch.zeros(2, state_rows, dtype=torch.int32)
    drafts[1, : topology.num_nodes] = torch.arange(20, 20 + topology.num_nodes)
    masks = torch.zeros(2, state_rows, dtype=torch.int64)
    masks[1, : topology.num_nodes] = torch.tensor(topology.packed_masks)
    paths = torch.zeros(2, count, width, dtype=torch.int32)
    paths[1] = pad_paths(topology, width, count)
    arrays = {"slots": ints(1, -1), "lengths": ints(0, 5), "tokens": torch.full((2, 9), 3, dtype=torch.int32)}
    arrays |= {"drafts": drafts, "num_drafts": ints(0, drafted), "tree_masks": masks, "tree_paths": paths}
    arrays |= {"grammar_forced": torch.zeros_like(drafts), "grammar_decided": torch.zeros(2, dtype=torch.int64)}
    arrays["draft_sources"] = torch.zeros_like(arrays["num_drafts"])
    return meant("gather_rows", {**arrays, "slot_ints": record}, T=bucket_rows)


@pytest.mark.parametrize("bucket_rows", [1, 3, 8])
@pytest.mark.parametrize("drafted", [0, 4, 7])
@pytest.mark.parametrize("limit", [0, 2, 63])
@pytest.mark.parametrize("room", [1, 2, 9])
def test_a_slot_verifies_the_least_of_its_limits(bucket_rows: int, drafted: int, limit: int, room: int) -> None:
    topology = TreeTopology.from_choices(TREE)
    outs = gather(topology, bucket_rows, drafted, limit, room)
    count = min(drafted, bucket_rows - 1, limit)
    live = [node == 0 or (node <= count and topology.depths[node] <= room - 1) for node in range(bucket_rows)]
    assert outs["row_live"][0].bool().tolist() == live
    assert not outs["row_live"][1].any()
    assert outs["num_verified"].tolist() == [sum(live) - 1, 0]
    for node, alive in enumerate(live):
        token = 3 if node == 0 else 20 + node
        assert outs["row_tokens"][0, node] == (token if alive else -1)
        assert outs["row_positions"][0, node] == (4 + topology.depths[node] if alive else 0)
        assert outs["row_masks"][0, node] == (topology.packed_masks[node] if alive else 0)
    used = {int(n) for path in outs["paths"][0] for n in path if n >= 0}
    assert used == {node for node, alive in enumerate(live) if alive}
    assert outs["dense_lens"].tolist() == [4, 0]
    assert (outs["paths"][1] == -1).all()


def test_rows_before_the_first_drafts_are_the_root_alone() -> None:
    record, zeros = torch.zeros(1, NUM_INTS, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int32)
    record[:, MAX_LENGTH], record[:, DRAFT_LIMIT] = 50, 63
    arrays = {"slots": ints(0), "lengths": ints(2), "tokens": ints([6, 6, 6]), "drafts": zeros, "num_drafts": ints(0)}
    arrays |= {"tree_masks": zeros.long(), "tree_paths": zeros[None], "slot_ints": record}
    arrays |= {"grammar_forced": ints([3, 7, 8, 9]), "grammar_decided": torch.tensor([1]), "draft_sources": ints(0)}
    outs = meant("gather_rows", arrays, T=4)
    assert outs["paths"].tolist() == [[[0, -1, -1, -1]]]
    assert outs["row_tokens"].tolist() == [[6, -1, -1, -1]]
    record[:, HAS_GRAMMAR] = 1
    with pytest.raises(DeviceError, match="slot 0 begins after 2 tokens, and what is forced is that after 1"):
        meant("gather_rows", arrays, T=4)
    assert meant("gather_rows", arrays, T=1)["row_tokens"].tolist() == [[6]]  # nothing to be forced
    arrays["grammar_decided"][:] = 2
    outs = meant("gather_rows", arrays, T=4)
    assert outs["row_tokens"].tolist() == [[6, 7, 8, 9]] and outs["paths"].tolist() == [[[0, 1, 2, 3]]]
    assert outs["row_masks"].tolist() == [[1, 3, 7, 15]] and outs["row_positions"].tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("forced", "expected"),
    [
        ((0,), (6, 3, 4, 5, 2)),  # the tree as it was drafted
        ((1, 3), (6, 3, 4, 5, 2)),
        ((2, 3, 2), (6, 3, 4, 5, 2)),
        ((2, 3, 4), (6, 3, 4, -1, -1)),
        ((3, 9, 9, 9), (6, 9, 9, -1, -1)),  # as many as a path has
    ],
    ids=str,
)
def test_what_a_grammar_forces_is_verified_unless_it_is_drafted_first(
    forced: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    topology = TreeTopology.from_choices(((0,), (1,), (2,), (0, 0)))
    record = torch.zeros(1, NUM_INTS, dtype=torch.int64)
    record[:, MAX_LENGTH], record[:, DRAFT_LIMIT], record[:, HAS_GRAMMAR] = 50, 63, 1
    arrays = {"slots": ints(0), "lengths": ints(2), "tokens": ints([6, 6, 6]), "drafts": ints([-1, 3, 4, 5, 2])}
    arrays |= {"num_drafts": ints(4), "tree_masks": torch.tensor([topology.packed_masks])}
    arrays |= {"tree_paths": ints(*[[*path, -1][:3] for path in topology.paths])[None], "slot_ints": record}
    arrays |= {"grammar_forced": ints([*forced, *[0] * (5 - len(forced))]), "grammar_decided": torch.tensor([2])}
    arrays["draft_sources"] = ints(1)
    outs = meant("gather_rows", arrays, T=5)
    assert outs["row_tokens"].tolist() == [[*expected]]
    live = sum(token >= 0 for token in expected)
    assert outs["num_verified"].tolist() == [live - 1] and outs["verified_depth"].tolist() == [2]
    assert outs["verified_source"].tolist() == [FORCED_DRAFTS if live < 5 else FROM_TEXT]
    if live < 5:
        assert outs["paths"][0].tolist() == [[0, 1, 2], [0, -1, -1], [0, -1, -1]]  # of three leaves
        assert outs["row_masks"].tolist() == [[1, 3, 7, 0, 0]]


def test_head_rows_follow_the_commit() -> None:
    arrays = {"accepted_tokens": ints([4, 5, -1], [6, 7, 8]), "commit_lens": ints(2, 3), "draft_live": flags(1, 0)}
    outs = meant("draft_rows", {**arrays, "dense_lens": ints(9, 3)})
    assert outs["tokens"].tolist() == [[4, 5, -1], [-1, -1, -1]]
    assert outs["positions"].tolist() == [[9, 10, 0], [0, 0, 0]]
    assert outs["write_lens"].tolist() == [10, 0]
    assert outs["live_positions"].tolist() == [[10], [0]]


def test_features_follow_the_accepted_path() -> None:
    low, high = torch.arange(12.0).reshape(6, 2), torch.arange(100.0, 112.0).reshape(6, 2)
    out = torch.full((6, 4), torch.nan)
    nodes = ints([0, 2, -1], [0, 1, 2])
    OPERATIONS["gather_features"](nodes, out=out, source0=low, source1=high)
    assert out[1].tolist() == [4, 5, 104, 105]
    assert not out[2].any()
    assert out[4].tolist() == [8, 9, 108, 109]
    last = meant("take_last", {"x": out, "commit_lens": ints(2, 0)}, W=4)["out"]
    assert torch.equal(last[0], out[1])
    assert not last[1].any()


def test_block_ends_keep_their_features() -> None:
    features, hidden = torch.zeros(9, 2), torch.arange(8.0).reshape(4, 2) + 1
    arrays = {"hidden": hidden, "positions": ints([3, 4], [7, 8]), "row_live": flags([1, 1], [0, 1])}
    arrays |= {"block_table": ints([1, 2, 3], [4, 5, 6]), "slots": ints(1, 0), "block_features": features}
    meant("store_boundary", {**arrays, "block_size": 4})
    assert torch.equal(features[4], hidden[0])
    assert int((features != 0).any(1).sum()) == 1


def test_a_chunk_takes_its_first_feature_from_the_block_before() -> None:
    features, hidden = torch.zeros(6, 2), torch.arange(8.0).reshape(4, 2) + 1
    features[3] = torch.tensor([50.0, 51.0])
    arrays = {"hidden": hidden, "block_table": ints([3, 5]), "block_features": features, "block_size": 4}
    shifted = meant("draft_prefill_rows", {**arrays, "chunk": ints(4, 4)})["shifted"]
    assert shifted.tolist() == [[50, 51], [1, 2], [3, 4], [5, 6]]
    assert torch.equal(features[5], hidden[3])
    shifted = meant("draft_prefill_rows", {**arrays, "chunk": ints(0, 3)})["shifted"]
    assert shifted[0].tolist() == [0, 0]
    assert features[3].tolist() == [50, 51]  # the block is not complete: three live rows of four


def test_a_level_gives_its_children_tokens_and_states() -> None:
    nodes, feedback = torch.full((2, 5), -7, dtype=torch.int32), torch.arange(6.0).reshape(2, 3)
    level = {"children": ints(1, 2), "child_rows": ints(0, 0), "child_ranks": ints(1, 0), "draft_nodes": nodes}
    meant("assign_drafts", {**level, "top_tokens": ints([11, 12], [21, 22])})
    assert nodes[:, 1:3].tolist() == [[12, 11], [22, 21]]
    arrays = {"feedback": feedback, "draft_nodes": nodes, "draft_live": flags(1, 0), "draft_lens": ints(9, 4)}
    arrays |= {"nodes": ints(2, 1), "parent_rows": ints(0, 0), "masks": torch.tensor([2, 1])}
    outs = meant("gather_level", {**arrays, "depth": 1}, H=3)
    assert outs["tokens"].tolist() == [[11, 12], [-1, -1]]
    assert outs["positions"].tolist() == [[8, 8], [0, 0]]
    assert outs["row_masks"].tolist() == [[2, 1], [0, 0]]
    assert torch.equal(outs["hidden"][1], feedback[0])


def test_masks_drop_what_follows_a_failed_draft() -> None:
    topology = TreeTopology.from_choices(TREE)
    rows = topology.num_nodes
    nodes = torch.arange(rows, dtype=torch.int32).repeat(2, 1)
    nodes[1, 3] = -1
    state = {
        "drafts": torch.zeros(3, 10, dtype=torch.int32),
        "num_drafts": ints(0, 0, 0),
        "tree_masks": torch.zeros(3, 10, dtype=torch.int64),
        "tree_paths": torch.zeros(3, 6, 5, dtype=torch.int32),
    }
    paths = pad_paths(topology, topology.depth + 1, len(topology.paths))
    masks = torch.tensor(topology.packed_masks)
    OPERATIONS["tree_masks"](nodes, flags(1, 1), ints(2, 0), masks, paths, **state)
    assert state["num_drafts"].tolist() == [2, 0, rows - 1]
    assert state["tree_masks"][2, :rows].tolist() == list(topology.packed_masks)
    assert state["tree_paths"][2, : paths.shape[0], : paths.shape[1]].tolist() == paths.tolist()
    assert (state["tree_paths"][2, paths.shape[0] :] == -1).all()
    assert not state["tree_paths"][1].any()


def test_publication_tells_each_slot_and_advances_last() -> None:
    rings = {
        "ring_records": poisoned(2, 3, RECORD_WIDTH),
        "ring_tokens": poisoned(2, 3, 4),
        "ring_logprob_values": torch.full((2, 3, 4, 21), torch.nan),
        "ring_logprob_ids": poisoned(2, 3, 4, 21),
        "ring_head": torch.tensor([3]),
    }
    ids = torch.full((2, 4, 21), -1, dtype=torch.int32)
    ids[0, 2, 0] = 42
    tokens, nodes = ints([8, 9, 10, -1], [-1] * 4), ints([0, 2, 3, -1], [-1] * 4)
    counts = (ints(FINISH_STOP, 0), ints(3, 0), ints(3, 0), ints(FORCED_DRAFTS, 0), ints(0, 12, 0))
    values = torch.zeros(2, 4, 21)
    OPERATIONS["publish"](ints(1, -1), ints(2, 0), ints(3, 0), tokens, nodes, *counts, values, ids, **rings)
    record = rings["ring_records"][1]
    assert record[:, SLOT].tolist() == [1, -1, -1]
    assert [int(record[0, c]) for c in (COMMITTED, FINISH, ACCEPTED, VERIFIED_SOURCE)] == [
        2, FINISH_STOP, 2, FORCED_DRAFTS,
    ]  # fmt: skip
    assert rings["ring_tokens"][1, 0].tolist() == [8, 9, -1, -1]
    assert rings["ring_logprob_ids"][1, 0, 1, 0] == 42
    assert rings["ring_head"].tolist() == [4]
    assert (rings["ring_records"][0] == -77).all()
