"""Recordings as other engines save them: transformers' own, and files of the layouts of vLLM and TensorRT-LLM, which
are made of transformers' values."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from bench.peers.tensors import tensorrt_llm, transformers, vllm
from lowlat.cli.commands.compare import command
from lowlat.cli.options import bundled
from lowlat.errors import ConfigError
from lowlat.tools.compare.recording import Recording, load_recording, save_recording

PROMPT = [5, 9, 300, 8, 77, 2001, 14]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Run the documented command of transformers on the bundled target, and return what that writes."""
    out = tmp_path_factory.mktemp("engines") / "transformers.safetensors"
    ids = ",".join(map(str, PROMPT))
    transformers.main([str(bundled("target")), "--token-ids", ids, "--num-tokens", "5", "--out", str(out)])
    return load_recording(out)


def compared(recording: Recording, path: Path, *options: str) -> dict[str, Any]:
    """The report of `lowlat compare --against` it."""
    save_recording(recording, path)
    given = [str(bundled("target")), "--against", str(path), "--json", *options]
    done = CliRunner().invoke(command, given, catch_exceptions=False)
    report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert done.exit_code == (0 if report["passed"] else 1)
    return report


def test_every_stage_of_transformers_is_recorded_and_agrees(whole: Recording, tmp_path: Path) -> None:
    report = compared(whole, tmp_path / "file.safetensors")
    layers = len(whole.stages) - 3
    found = {stage["stage"]: stage["num_rows"] for stage in report["stages"]}
    assert report["passed"] and report["greedy_identical"] and len(whole.tokens) == len(PROMPT) + 5
    rows = len(whole.tokens) - 1
    assert found == {
        **{f"target.residual.{boundary}": rows for boundary in range(layers + 1)},
        "target.pre_head_hidden": 5,
        "target.logits": 5,
    }
    shifted = {**whole.stages, "target.residual.2": whole.stages["target.residual.3"].clone()}
    wrong = Recording(whole.tokens, whole.num_prompt, (), (), shifted)
    assert compared(wrong, tmp_path / "wrong.safetensors")["first_beyond_tolerance"] == "target.residual.2"


def test_a_file_of_vllm_s_layout_agrees(whole: Recording, tmp_path: Path) -> None:
    last = len(whole.stages) - 3
    layers = [0, 2, last]
    arguments = vllm.engine_arguments("DIR", "bfloat16", layers, "/tmp")
    config = arguments["speculative_config"]["draft_model_config"]["hf_config"]
    assert config == {"eagle_aux_hidden_state_layer_ids": layers} and not arguments["enable_chunked_prefill"]
    states = torch.stack([whole.stages[f"target.residual.{layer}"] for layer in layers], dim=1)
    saved = {"token_ids": torch.tensor(whole.tokens[:-1]), "hidden_states": states}
    recording = vllm.recording_of(saved, whole.tokens, whole.num_prompt, layers)
    report = compared(recording, tmp_path / "vllm.safetensors")
    assert report["passed"] and [stage["stage"] for stage in report["stages"]] == [
        f"target.residual.{layer}" for layer in layers
    ]
    with pytest.raises(ConfigError, match="must have 2 boundaries"):
        vllm.recording_of(saved, whole.tokens, whole.num_prompt, layers[:2])
    with pytest.raises(ConfigError, match="of 11 other tokens"):
        vllm.recording_of({**saved, "token_ids": saved["token_ids"] + 1}, whole.tokens, whole.num_prompt, layers)


@pytest.mark.parametrize("names", [(0, 0), (1, 1)], ids=["saved", "documented"])
def test_a_request_of_tensorrt_llm_s_layout_agrees(whole: Recording, tmp_path: Path, names: tuple[int, int]) -> None:
    layers, count = [3, 1], len(PROMPT)
    assert tensorrt_llm.config_arguments(layers, "DIR")["eagle3_layers_to_capture"] == {1, 3}
    streams = torch.cat([whole.stages[f"target.residual.{layer + 1}"][:count] for layer in sorted(layers)], dim=-1)
    final = transformers_final(whole, count)
    saved = {
        "id": 1,
        "input_ids": torch.tensor(PROMPT),
        tensorrt_llm.STREAMS[names[0]]: streams,
        tensorrt_llm.FINAL[names[1]]: final,
    }
    recording = tensorrt_llm.recording_of(saved, whole.tokens[count], layers)
    report = compared(recording, tmp_path / "trt.safetensors")
    found = {stage["stage"]: stage["num_rows"] for stage in report["stages"]}
    assert report["passed"] and report["greedy_identical"]
    assert found == {"target.residual.2": count, "target.residual.4": count, "target.pre_head_hidden": 1}
    with pytest.raises(ConfigError, match=r"must have 3 streams of"):
        tensorrt_llm.recording_of(saved, whole.tokens[count], [1, 2, 3])
    with pytest.raises(ConfigError, match="a request has input_ids, and must have"):
        tensorrt_llm.recording_of({"input_ids": saved["input_ids"]}, 1, layers)


def transformers_final(whole: Recording, count: int) -> torch.Tensor:
    """Final hidden states of the first tokens."""
    return whole.stages["target.pre_head_hidden"][:count]
