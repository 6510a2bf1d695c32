"""The benchmark of loading: it writes what the loader reads, times it, and leaves nothing behind."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lowlat.models.target import load_target


def bench_load() -> Any:
    """bench/load.py, which lies beside the packages."""
    if "bench" not in sys.modules:
        package = ModuleType("bench")
        package.__path__ = [str(Path(__file__).resolve().parents[2] / "bench")]
        sys.modules["bench"] = package
    return importlib.import_module("bench.load")


def test_random_models_load_and_parts_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = bench_load()
    load.main(["--shape", "tiny", "--part", "1", "--scratch", str(tmp_path)])
    assert not list(tmp_path.iterdir())
    found = json.loads(capsys.readouterr().out)
    load.write_model(tmp_path / "model", "tiny", 1)
    target = load_target(tmp_path / "model")
    one = load.measure(tmp_path / "model", torch.device("meta"), cold=False)
    assert target.config.experts is not None and target.config.experts.weight_format == "mxfp4"
    for name in ("cold", "warm"):
        assert found[name]["bytes"] == 2 * one["bytes"]  # two parts of one layer, each with its embedding
        assert found[name]["gb_per_s"] > 0 and found[name]["seconds"] > 0
        assert found[name]["host_load_bytes"] == one["host_load_bytes"] > 0
    out = tmp_path / "load.json"
    for commit in ("first", "second"):
        load.main(["--directory", str(tmp_path / "model"), "--commit", commit, "--out", str(out)])
    rows = json.loads(out.read_text())
    assert [row["commit"] for row in rows] == ["first", "second"]
    assert all(row["model"] == "model" and row["warm"]["bytes"] == one["bytes"] for row in rows)
    load.main(["--directory", str(tmp_path / "model"), "--runs", "warm", "--out", str(out)])
    alone = json.loads(out.read_text())[2]
    assert alone["warm"]["bytes"] == one["bytes"] and "cold" not in alone
    assert (tmp_path / "model" / "config.json").exists()
