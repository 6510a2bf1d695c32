"""The start benchmark's checkpoint: both loaders read it, and a process starts from it."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from benches import bench

from lowlat.models.target import load_target
from lowlat.speculators.eagle3.weights import load_draft_model

cases, start = bench("dense_cases"), bench("start")
GEOMETRY = replace(cases.TINY, capture_boundaries=(2, 3, 4))  # SpecForge cannot write those of TINY


def test_the_checkpoint_holds_the_weights_by_their_public_names(tmp_path: Path) -> None:
    target_path, head_path = start.write_checkpoint(GEOMETRY, tmp_path, torch.device("cpu"))
    target = load_target(target_path, dtype="bfloat16")
    head = load_draft_model(head_path, target.config)
    expected = cases.make_weights(GEOMETRY, torch.device("cpu"))
    found = {**target.weights, **head.weights}
    assert head.config.capture_boundaries == GEOMETRY.capture_boundaries
    for name in ("layers.1.qkv.weight", "layers.3.gate_up.weight", "lm_head.weight", "head.fc.weight"):
        assert torch.equal(found[name], expected[name]), name
    assert torch.equal(found["head.draft_to_target"], expected["head.draft_to_target"])


def test_a_process_starts_from_it(tmp_path: Path) -> None:
    out = tmp_path / "start.json"
    start.main(["--directory", str(tmp_path), "--tiny", "--device", "cpu", "--max-batch", "1", "--max-context", "64",
          "--warm", "0", "--out", str(out)])  # fmt: skip
    (row,) = json.loads(out.read_text())["rows"]
    assert row["kernels"] == "compiled"
    assert 0 < row["read_s"] <= row["ready_s"] <= row["first_token_s"]
