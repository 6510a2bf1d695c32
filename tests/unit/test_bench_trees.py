"""The program that compares chains, static and dynamic trees by acceptance: what it writes of a short run."""

import json
from pathlib import Path

import pytest
from benches import bench


@pytest.mark.second
def test_shapes_side_by_side(tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.json", tmp_path / "trees.json"
    prompts.write_text(json.dumps(["The President shall", "We the People of"]))
    sizes = ["--limit", "1", "--probes", "1", "--max-tokens", "8", "--temperature", "0", "--chains", "3", "--rows", "8"]
    trees = bench("trees")
    trees.main([*sizes, "--dynamic", "3x3", "--prompts", str(prompts), "--out", str(out)])
    found = json.loads(out.read_text())
    (table,) = found["conditions"]["acceptance_by_rank"].values()
    assert (
        [len(row) for row in table] == [trees.RANKS] * trees.DEPTH
        and all(sum(row) <= 1 for row in table)
        and table[0][0] > 0
    )
    assert [(row["shape"], row["rows"]) for row in found["rows"]] == [("chain", 4), ("static", 8), ("dynamic", 8)]
    for row in found["rows"]:
        assert (
            row["identical"]
            and row["tokens"] == 8
            and 1 < row["mean_acceptance_length"] <= row["num_speculative_tokens"] + 1
        )
        assert not any(name.endswith("tokens_per_s") for name in row)
