"""The start benchmark's checkpoint: both loaders read it, and a process starts from it."""

import json
from pathlib import Path

import torch

from bench.dense_cases import TINY, make_weights
from bench.start import main, write_checkpoint
from lowlat.checkpoint import load_head, load_target


def test_the_checkpoint_holds_the_weights_by_their_public_names(tmp_path: Path) -> None:
    target_path, head_path = write_checkpoint(TINY, tmp_path, torch.device("cpu"))
    target = load_target(target_path, dtype="bfloat16")
    head = load_head(head_path, target.config)
    expected = make_weights(TINY, torch.device("cpu"))
    found = {**target.weights, **head.weights}
    assert head.config.capture_boundaries == TINY.capture_boundaries
    for name in ("layers.1.qkv.weight", "layers.3.gate_up.weight", "lm_head.weight", "head.fc.weight"):
        assert torch.equal(found[name], expected[name]), name
    assert torch.equal(found["head.draft_to_target"], expected["head.draft_to_target"])


def test_a_process_starts_from_it(tmp_path: Path) -> None:
    out = tmp_path / "start.json"
    main(["--directory", str(tmp_path), "--tiny", "--device", "cpu", "--max-batch", "1", "--max-context", "64",
          "--warm", "0", "--out", str(out)])  # fmt: skip
    (row,) = json.loads(out.read_text())["rows"]
    assert row["kernels"] == "compiled"
    assert 0 < row["read_s"] <= row["ready_s"] <= row["first_token_s"]
