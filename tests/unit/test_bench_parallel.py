"""The benchmark of several GPUs, on tiny models without a GPU: rows of steps, and what a soak sees between ranks."""

import json
from pathlib import Path

import pytest
import torch
from benches import bench

from bench.dense_cases import Case
from bench.soak import Soaked, soak

parallel = bench("parallel")
SMALL = ["--small", "--device", "cpu", "--commit", "abc", "--only", "tiny, 1 x"]


@pytest.mark.second
def test_a_row_for_each_case_and_number_of_gpus(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    assert parallel.main([*SMALL, "--only", "nothing", "--replays", "2", "--turn", "2", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())
    kinds = [(row["tensor_parallel_size"], row.get("tp_invariant", False)) for row in rows]
    assert kinds == [(1, False), (2, False), (2, True)]
    assert all(row["ms_p99"] >= row["ms_p50"] > 0 and row["floor_ms"] > 0 for row in rows)
    assert ["exchange_us" in row for row in rows] == [False, True, False]


@pytest.mark.second
def test_a_soak_of_ranks_has_a_row(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    assert parallel.main([*SMALL, "--soak", "6", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())
    assert (row["steps"], row["tokens_a_step"], row["problems"], row["tp_invariant"]) == (6, 1.0, [], True)


class Ranks(Soaked):
    """Two ranks in place of a step, of which the second has one token of its own."""

    case = Case(1, 24, 0)

    def __init__(self) -> None:
        names = ("tokens", "lengths", "active", "num_drafts", "block_table")
        self._states = [{name: torch.zeros(1, 64, dtype=torch.int32) for name in names} for _ in range(2)]
        self._states[1]["tokens"][0, 3] = 1

    def reset(self) -> None:
        for state in self._states:
            state["lengths"], state["active"], state["num_drafts"] = map(torch.tensor, ([24], [1], [0]))

    def replay(self) -> None:
        for state in self._states:
            state["lengths"] += 1

    def looks(self) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        return [(state, torch.ones(1, dtype=torch.bool)) for state in self._states]

    def close(self) -> None:
        self._states.clear()


def test_a_rank_that_differs_is_found() -> None:
    row = soak(Ranks, 5)
    assert row["problems"] == ["rank 1: tokens differs from the first rank's after 5 steps"]
