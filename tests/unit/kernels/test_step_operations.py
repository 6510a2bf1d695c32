"""The integer part of a step: rows, acceptance, truncation, commit, masks, publication."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.kernels.reference.rows.draft_rows import (
    assign_drafts,
    draft_prefill_rows,
    draft_rows,
    gather_features,
    gather_level,
    store_boundary,
    take_last,
    tree_masks,
)
from lowlat.kernels.reference.step.accept import (
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    accept,
    accept_simulated,
    commit,
    truncate,
)
from lowlat.kernels.reference.step.publish import ACCEPTED, COMMITTED, FINISH, RECORD_WIDTH, SLOT, publish
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, MAX_LENGTH, NUM_INTS
from lowlat.kernels.reference.step.slots import gather_rows, list_active_slots
from lowlat.speculators.tree.topology import TreeTopology


def ints(*values: object) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def poisoned(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(shape, 77, dtype=dtype)


def pad_paths(topology: TreeTopology, width: int, count: int) -> torch.Tensor:
    rows = [[*path, *[-1] * (width - len(path))] for path in topology.paths]
    rows += [[-1] * width] * (count - len(rows))
    return torch.tensor(rows, dtype=torch.int32)


def test_active_slots_are_listed_in_order() -> None:
    slots = poisoned(4)
    list_active_slots(ints(0, 1, 0, 1, 1, 0), slots=slots)
    assert slots.tolist() == [1, 3, 4, -1]


TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


def run_accept(
    topology: TreeTopology, targets: list[int], drafts: list[int], live: int
) -> tuple[list[int], list[int], int]:
    rows = topology.num_nodes
    paths = pad_paths(topology, topology.depth + 1, len(topology.paths))
    dead = (paths >= live) | (paths < 0)
    paths = torch.where(dead.cumsum(-1) > 0, -1, paths)
    outs = {
        "accepted_tokens": poisoned(1, rows),
        "accepted_nodes": poisoned(1, rows),
        "accepted_lens": poisoned(1),
        "best_path": poisoned(1),
    }
    accept(torch.tensor([targets]), torch.tensor([drafts]), paths[None], ints(0), **outs)
    count = int(outs["accepted_lens"])
    assert outs["accepted_tokens"][0, count:].eq(-1).all()
    return outs["accepted_tokens"][0, :count].tolist(), outs["accepted_nodes"][0, :count].tolist(), count


@settings(max_examples=150, deadline=None)
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
    outs = {
        "accepted_tokens": poisoned(1, 2),
        "accepted_nodes": poisoned(1, 2),
        "accepted_lens": poisoned(1),
        "best_path": poisoned(1),
    }
    accept(ints(1, 2)[None], ints(1, 2)[None], ints(0, 1)[None, None], ints(-1), **outs)
    assert outs["accepted_lens"].tolist() == [0]
    assert outs["accepted_tokens"].tolist() == [[-1, -1]]
    assert outs["best_path"].tolist() == [-1]


@pytest.mark.parametrize("mean", [1.0, 1.7, 2.5, 3.0, 4.0])
def test_simulated_acceptance_has_the_mean_asked_for(mean: float) -> None:
    paths = ints(0, 1, 2, 3)[None, None]
    total, rounds = 0, 600
    for position in range(rounds):
        outs = {
            "accepted_tokens": poisoned(1, 4),
            "accepted_nodes": poisoned(1, 4),
            "accepted_lens": poisoned(1),
            "best_path": poisoned(1),
        }
        accept_simulated(
            ints(5, 6, 7, 8)[None],
            ints(0, 1, 2, 3)[None],
            paths,
            ints(0),
            ints(position),
            **outs,
            mean_length=mean,
            seed=3,
        )
        count = int(outs["accepted_lens"])
        expected = [*range(1, count), 5 + count - 1]
        assert outs["accepted_tokens"][0, :count].tolist() == expected
        total += count
    assert abs(total / rounds - mean) < 0.07


def run_truncate(
    tokens: list[int], finite: list[int], *, length: int, max_length: int, stops: list[int]
) -> tuple[int, int]:
    record = torch.zeros(1, NUM_INTS, dtype=torch.int64)
    record[0, MAX_LENGTH] = max_length
    commit_lens, finish = poisoned(1), poisoned(1)
    truncate(
        ints(*tokens)[None],
        torch.arange(len(tokens), dtype=torch.int32)[None],
        ints(len(tokens)),
        torch.tensor([finite], dtype=torch.uint8),
        ints(0),
        ints(length),
        record,
        ints(*stops, -1)[None],
        commit_lens=commit_lens,
        finish=finish,
    )
    return int(commit_lens), int(finish)


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
    length, max_length = limits
    assert run_truncate(tokens, finite, length=length, max_length=max_length, stops=stops) == expected


def test_commit_moves_lengths_and_ends_slots() -> None:
    tokens = torch.zeros(3, 10, dtype=torch.int32)
    lengths, active, drafts = ints(4, 2, 6), ints(1, 1, 1), ints(3, 3, 3)
    counts = torch.zeros(3, 12, dtype=torch.int32)
    live, draft_lens = poisoned(2, dtype=torch.uint8), poisoned(2)
    commit(
        torch.tensor([[8, 8, 9], [7, -1, -1]], dtype=torch.int32),
        ints(3, 1),
        ints(0, FINISH_LENGTH),
        ints(2, 0),
        tokens=tokens,
        lengths=lengths,
        active=active,
        output_counts=counts,
        num_drafts=drafts,
        draft_live=live,
        draft_lens=draft_lens,
    )
    assert lengths.tolist() == [5, 2, 9]
    assert active.tolist() == [0, 1, 1]
    assert drafts.tolist() == [0, 3, 0]
    assert tokens[2, 6:9].tolist() == [8, 8, 9]
    assert tokens[0, 4] == 7
    assert counts[2, 8] == 2
    assert counts.sum() == 4
    assert live.tolist() == [1, 0]
    assert draft_lens.tolist() == [9, 0]


def gather(topology: TreeTopology, bucket_rows: int, drafted: int, limit: int, room: int) -> dict[str, torch.Tensor]:
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
    outs = {
        "row_tokens": poisoned(2, bucket_rows),
        "row_positions": poisoned(2, bucket_rows),
        "row_live": poisoned(2, bucket_rows, dtype=torch.uint8),
        "row_masks": poisoned(2, bucket_rows, dtype=torch.int64),
        "paths": poisoned(2, count, width),
        "dense_lens": poisoned(2),
        "num_verified": poisoned(2),
        "verified_depth": poisoned(2),
    }
    tokens = torch.full((2, 9), 3, dtype=torch.int32)
    gather_rows(ints(1, -1), ints(0, 5), tokens, drafts, ints(0, drafted), masks, paths, record, **outs)
    return outs


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
    topology = TreeTopology.chain(3)
    record = torch.zeros(1, NUM_INTS, dtype=torch.int64)
    record[:, MAX_LENGTH], record[:, DRAFT_LIMIT] = 50, 63
    outs = {
        "row_tokens": poisoned(1, 4),
        "row_positions": poisoned(1, 4),
        "row_live": poisoned(1, 4, dtype=torch.uint8),
        "row_masks": poisoned(1, 4, dtype=torch.int64),
        "paths": poisoned(1, 1, 4),
        "dense_lens": poisoned(1),
        "num_verified": poisoned(1),
        "verified_depth": poisoned(1),
    }
    zeros = torch.zeros(1, 4, dtype=torch.int32)
    gather_rows(ints(0), ints(2), ints(6, 6, 6)[None], zeros, ints(0), zeros.long(), zeros[None], record, **outs)
    assert outs["paths"].tolist() == [[[0, -1, -1, -1]]]
    assert outs["row_tokens"].tolist() == [[6, -1, -1, -1]]
    assert topology.depth == 3


def test_head_rows_follow_the_commit() -> None:
    outs = {
        "tokens": poisoned(2, 3),
        "positions": poisoned(2, 3),
        "row_live": poisoned(2, 3, dtype=torch.uint8),
        "write_lens": poisoned(2),
        "live_positions": poisoned(2, 1),
    }
    draft_rows(
        torch.tensor([[4, 5, -1], [6, 7, 8]], dtype=torch.int32),
        ints(2, 3),
        torch.tensor([1, 0], dtype=torch.uint8),
        ints(9, 3),
        **outs,
    )
    assert outs["tokens"].tolist() == [[4, 5, -1], [-1, -1, -1]]
    assert outs["positions"].tolist() == [[9, 10, 0], [0, 0, 0]]
    assert outs["write_lens"].tolist() == [10, 0]
    assert outs["live_positions"].tolist() == [[10], [0]]


def test_features_follow_the_accepted_path() -> None:
    low, high = torch.arange(12.0).reshape(6, 2), torch.arange(100.0, 112.0).reshape(6, 2)
    out = torch.full((6, 4), torch.nan)
    gather_features(torch.tensor([[0, 2, -1], [0, 1, 2]]), out=out, source0=low, source1=high)
    assert out[1].tolist() == [4, 5, 104, 105]
    assert not out[2].any()
    assert out[4].tolist() == [8, 9, 108, 109]
    last = torch.full((2, 4), torch.nan)
    take_last(out, ints(2, 0), out=last)
    assert torch.equal(last[0], out[1])
    assert not last[1].any()


def test_block_ends_keep_their_features() -> None:
    features = torch.zeros(9, 2)
    hidden = torch.arange(8.0).reshape(4, 2) + 1
    store_boundary(
        hidden,
        torch.tensor([[3, 4], [7, 8]]),
        torch.tensor([[1, 1], [0, 1]], dtype=torch.uint8),
        torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32),
        ints(1, 0),
        block_features=features,
        block_size=4,
    )
    assert torch.equal(features[4], hidden[0])
    assert int((features != 0).any(1).sum()) == 1


def test_a_chunk_takes_its_first_feature_from_the_block_before() -> None:
    features = torch.zeros(6, 2)
    features[3] = torch.tensor([50.0, 51.0])
    hidden = torch.arange(8.0).reshape(4, 2) + 1
    shifted = torch.full((4, 2), torch.nan)
    table = torch.tensor([[3, 5]], dtype=torch.int32)
    draft_prefill_rows(hidden, torch.tensor([4, 4]), table, block_features=features, shifted=shifted, block_size=4)
    assert shifted.tolist() == [[50, 51], [1, 2], [3, 4], [5, 6]]
    assert torch.equal(features[5], hidden[3])
    draft_prefill_rows(hidden, torch.tensor([0, 3]), table, block_features=features, shifted=shifted, block_size=4)
    assert shifted[0].tolist() == [0, 0]
    assert features[3].tolist() == [50, 51]  # the block is not complete: three live rows of four


def test_a_level_gives_its_children_tokens_and_states() -> None:
    draft_nodes = torch.full((2, 5), -7, dtype=torch.int32)
    top = torch.tensor([[11, 12], [21, 22]], dtype=torch.int32)
    assign_drafts(top, ints(1, 2), ints(0, 0), ints(1, 0), draft_nodes=draft_nodes)
    assert draft_nodes[:, 1:3].tolist() == [[12, 11], [22, 21]]
    outs = {
        "hidden": torch.full((4, 3), torch.nan),
        "tokens": poisoned(2, 2),
        "row_live": poisoned(2, 2, dtype=torch.uint8),
        "positions": poisoned(2, 2),
        "row_masks": poisoned(2, 2, dtype=torch.int64),
    }
    feedback = torch.arange(6.0).reshape(2, 3)
    gather_level(
        feedback,
        draft_nodes,
        torch.tensor([1, 0], dtype=torch.uint8),
        ints(9, 4),
        ints(2, 1),
        ints(0, 0),
        torch.tensor([2, 1]),
        **outs,
        depth=1,
    )
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
    tree_masks(
        nodes,
        torch.tensor([1, 1], dtype=torch.uint8),
        ints(2, 0),
        torch.tensor(topology.packed_masks),
        paths,
        **state,
    )
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
    publish(
        ints(1, -1),
        ints(2, 0),
        ints(3, 0),
        torch.tensor([[8, 9, 10, -1], [-1] * 4], dtype=torch.int32),
        torch.tensor([[0, 2, 3, -1], [-1] * 4], dtype=torch.int32),
        ints(FINISH_STOP, 0),
        ints(3, 0),
        ints(3, 0),
        ints(0, 12, 0),
        torch.zeros(2, 4, 21),
        ids,
        **rings,
    )
    record = rings["ring_records"][1]
    assert record[:, SLOT].tolist() == [1, -1, -1]
    assert [int(record[0, c]) for c in (COMMITTED, FINISH, ACCEPTED)] == [2, FINISH_STOP, 2]
    assert rings["ring_tokens"][1, 0].tolist() == [8, 9, -1, -1]
    assert rings["ring_logprob_ids"][1, 0, 1, 0] == 42
    assert rings["ring_head"].tolist() == [4]
    assert (rings["ring_records"][0] == 77).all()
