"""The program that compares chains, static and dynamic trees by acceptance: what it writes of a short run."""

import json
from pathlib import Path

import pytest
from benches import bench

SHORT = "--limit 1 --probes 1 --max-tokens 16 --temperature 0 --chains 2 --rows 4 --dynamic 2x2"


@pytest.mark.second
def test_shapes_side_by_side(tmp_path: Path) -> None:
    prompts, out, trees = tmp_path / "prompts.json", tmp_path / "trees.json", bench("trees")
    prompts.write_text(json.dumps(["We the People of", "The President shall"]))
    trees.main([*SHORT.split(), "--prompts", str(prompts), "--out", str(out)])
    found = json.loads(out.read_text())
    (table,) = found["conditions"]["acceptance_by_rank"].values()
    assert [len(row) for row in table] == [trees.RANKS] * trees.DEPTH
    assert table[0][0] > 0 and all(sum(row) <= 1 for row in table)
    assert [(row["shape"], row["rows"]) for row in found["rows"]] == [("chain", 3), ("static", 4), ("dynamic", 4)]
    for row in found["rows"]:
        assert row["identical"] and row["tokens"] == 16
        assert 1 < row["mean_acceptance_length"] <= row["num_speculative_tokens"] + 1
        assert not any(name.endswith("tokens_per_s") for name in row)
