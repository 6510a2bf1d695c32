"""The reference executor on a CUDA device: the same programs, the same tokens, logits near the CPU's."""

import json
from pathlib import Path

import pytest
import torch

import lowlat
from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.step.variants import first_token_bucket

DEMO = Path(lowlat.__file__).parent / "demo"
HEAD = SpeculativeConfig(model=DEMO / "head", num_speculative_tokens=3, strict=True)


def held_out(count: int) -> list[str]:
    domains = json.loads((DEMO / "prompts.json").read_text(encoding="utf-8"))
    return [prompts[0] for prompts in domains.values() if isinstance(prompts, list)][:count]


def decode(device: str, depth: int, params: SamplingParams, prompts: list[str]) -> list[list[int]]:
    with Runtime.load(
        DEMO / "target", HEAD, device=device, executor="reference", max_batch=4, max_context=512
    ) as runtime:
        ids = [runtime.submit(prompt, params) for prompt in prompts]
        tokens: dict[str, list[int]] = {name: [] for name in ids}
        while runtime.busy:
            for output in runtime.step(depth):
                tokens[output.request_id].extend(output.token_ids)
        runtime.scheduler.invariants()
        return [tokens[name] for name in ids]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_changes_no_token(temperature: float) -> None:
    params = SamplingParams(max_tokens=48, temperature=temperature, seed=5, ignore_eos=True)
    prompts = held_out(3)
    baseline = decode("cuda", 0, params, prompts)
    assert all(len(tokens) == 48 for tokens in baseline)
    for depth in (1, 3, 7):
        assert decode("cuda", depth, params, prompts) == baseline


def test_logits_agree_with_the_cpu() -> None:
    logits = {}
    for device in ("cpu", "cuda"):
        with Runtime.load(
            DEMO / "target", HEAD, device=device, executor="reference", max_batch=1, max_context=256
        ) as runtime:
            assert runtime.device_choice.device.type == device
            runtime.submit(held_out(1)[0], SamplingParams(max_tokens=1))
            while runtime.busy:
                runtime.step(0)
            logits[device] = runtime.executor.scratch(first_token_bucket(0))["target.logits"].float().cpu()
    difference = (logits["cuda"] - logits["cpu"]).norm() / logits["cpu"].norm()
    assert difference < 1e-2  # bf16 buffers round both; products accumulate in float32


def test_auto_takes_the_gpu() -> None:
    with Runtime.load(DEMO / "target", max_batch=1, max_context=256) as runtime:
        assert runtime.device_choice.device.type == "cuda"
        assert runtime.device_choice.executor == "graph"
        assert "usable NVIDIA GPU" in runtime.device_choice.reason
        assert torch.cuda.memory_allocated() > 0
