"""Faults of the model and the memory after a server: NaN, a head or a directory that is not right, too little room."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import edit_json
from cli_calls import refusal
from raw_client import raw_client
from served_model import TARGET, ServedModel, alone, load_small, served_model, small_pair
from stages import later
from stages import wide as wide_case

from lowlat.ipc import Client

PROMPTS = ([11, 12, 13], [21, 22, 23, 24], [31, 32])
SAMPLING: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "ignore_eos": True, "seed": 9}


@pytest.mark.parametrize("value", [float("nan"), later(float("inf"))])
def test_not_finite_fails_that_request_by_position_and_its_neighbours_are_identical(
    tmp_path: Path, value: float
) -> None:
    runtime = load_small(prefix_reuse=False)
    expected = [alone(runtime, prompt, **SAMPLING) for prompt in PROMPTS]

    def poison(engine: ServedModel) -> None:
        slots = {slot["request_id"]: slot for slot in runtime.slots()}
        victim = slots.get(engine.order[1]) if len(engine.order) == 3 else None
        if victim is not None and victim["completion_tokens"] >= 5:
            state = runtime.executor.state
            block = int(state["block_table"][victim["slot"], 0])
            state["v_cache.0"][block] = value
            engine.before_step = None

    with served_model(tmp_path, runtime) as (server, engine), raw_client(server.endpoint) as client:
        engine.before_step = poison
        done = [client.submit(number, prompt, **SAMPLING) for number, prompt in enumerate(PROMPTS)]
        client.finish(*done, timeout_s=60)
        failed = done[1].end
        assert failed is not None
        assert (failed.finish_reason, failed.code) == ("error", "not_finite")
        position = len(PROMPTS[1]) + len(done[1].token_ids)
        assert any(str(place) in str(failed.message) for place in (position - 1, position)), failed.message
        assert 5 <= len(done[1].token_ids) < 24
        assert done[1].token_ids == expected[1][: len(done[1].token_ids)]
        assert [done[place].token_ids for place in (0, 2)] == [expected[0], expected[2]]
        again = client.submit(3, PROMPTS[1], **SAMPLING)  # nothing of it stays in the blocks
        client.finish(again, timeout_s=60)
        assert again.token_ids == expected[1]
    assert not runtime.busy


@pytest.mark.second
def test_kv_blocks_cannot_run_out_in_a_step(tmp_path: Path) -> None:
    runtime = load_small(max_batch=3, max_context=128, kv_blocks=6, block_size=8, prefill_chunk=8)
    sampling = {**SAMPLING, "max_tokens": 20}  # four blocks of the five, speculation included: one at a time
    expected = [alone(runtime, [number + 1, 5], **sampling) for number in range(4)]
    with served_model(tmp_path, runtime) as (server, _), raw_client(server.endpoint) as client:
        done = [client.submit(number, [number + 1, 5], **sampling) for number in range(4)]
        client.finish(*done, timeout_s=120)
        assert [one.token_ids for one in done] == expected
        refused = client.submit(9, [1, 2], max_tokens=100)
        client.finish(refused)
        assert refused.error is not None
        assert refused.error.code == "invalid"
        assert "kv_blocks" in refused.error.message


@pytest.mark.parametrize("fault", ["truncated", wide_case("missing")])
def test_a_head_that_is_not_right_is_one_warning_and_the_baseline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    sampling: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    with load_small() as with_draft_model:
        expected = alone(with_draft_model, [11, 12, 13], **sampling)
    head = tmp_path / "head"
    if fault == "truncated":
        shutil.copytree(small_pair().head, head)
        truncate(head / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        runtime = load_small(head=head, strict=False)
    assert runtime.speculation_error
    assert [record.getMessage().startswith("speculation is off") for record in caplog.records] == [True]
    with served_model(tmp_path, runtime) as (server, _), Client(server.endpoint) as client:
        chunks = list(client.generate([11, 12, 13], **sampling))
        assert "eagle_speculation" not in (chunks[-1].metrics or {})
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == expected
        assert "eagle_speculation" not in client.stats()["engine"]


def test_a_strict_head_that_is_missing_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone_in(tmp_path, monkeypatch)
    said = refusal("serve", "--model", TARGET, "--head", tmp_path / "nothing", "--strict")
    assert "nothing" in said


def test_too_little_memory_is_known_at_start_with_numbers_and_knobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone_in(tmp_path, monkeypatch)
    said = refusal("serve", "--model", TARGET, "--set", f"kv_blocks={1 << 30}")
    for words in ("GiB are needed", "GiB are free", "kv ", "max_batch", "max_context", "kv_blocks"):
        assert words in said


def truncate(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def wide(directory: Path) -> None:
    edit_json(
        directory / "config.json", hidden_size=json.loads((directory / "config.json").read_text())["hidden_size"] * 2
    )


def pickled(directory: Path) -> None:
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    torch.save({}, directory / "pytorch_model.bin")


HOSTILE: dict[str, tuple[Any, tuple[str, ...]]] = {
    "truncated": (lambda d: truncate(d / "model-00001-of-00002.safetensors"), ("model-00001-of-00002.safetensors",)),
    "missing shard": (lambda d: (d / "model-00002-of-00002.safetensors").unlink(), ("model-00002-of-00002",)),
    "no config": (lambda d: (d / "config.json").unlink(), ("config.json",)),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), ("config.json",)),
    "other shapes": (wide, ("shape", "expected")),
    "pickled": (pickled, ("safetensors",)),
    "remote code": (lambda d: edit_json(d / "config.json", architectures=["Evil"], model_type="evil"), ("evil",)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_directory_that_is_not_right_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    alone_in(tmp_path, monkeypatch)
    directory = tmp_path / "target"
    shutil.copytree(TARGET, directory)
    spoil, words = HOSTILE[name]
    spoil(directory)
    said = refusal("serve", "--model", directory)
    for word in words:
        assert word.lower() in said.lower(), said
    assert not list((tmp_path / "run").rglob("*.sock"))  # and nobody can connect to what never served


def alone_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "run"))
    monkeypatch.delenv("LOWLAT_ENDPOINT", raising=False)
