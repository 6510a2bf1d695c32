"""A trained hybrid: transformers reads it alike, its MTP layer's drafts are accepted, and they change no token."""

from typing import Any

import pytest
import torch
from recording import Recorder, run_all
from trained_hybrid import TRAINED_HYBRID, beginnings

from lowlat import Runtime, SamplingParams, SpeculativeConfig

pytestmark = pytest.mark.second

OPTIONS: dict[str, Any] = {"device": "cpu", "max_batch": 2, "max_context": 256, "prefix_reuse": False}
MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=3, strict=True)


def test_transformers_reads_it_alike() -> None:
    from transformers import AutoModelForCausalLM

    with Runtime.load(TRAINED_HYBRID, MTP, dtype="float32", **OPTIONS) as runtime:
        recorder = Recorder(runtime)
        assert runtime.codec is not None
        prompt = runtime.codec.encode(beginnings(1)[0], add_special_tokens=False)
        name = recorder.submit(prompt, SamplingParams(max_tokens=16))
        answer = run_all(runtime)[name]
        found = torch.stack([recorder.logits[name][len(prompt) + k] for k in range(len(answer))])
    model = AutoModelForCausalLM.from_pretrained(TRAINED_HYBRID, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-3)
    assert expected.argmax(-1).tolist() == answer


def test_drafts_are_accepted_and_change_no_token() -> None:
    """Of its own layer, trained, where random ones would have some 1.0 tokens a step."""
    ways = [SamplingParams(max_tokens=24, temperature=heat, seed=3) for heat in (0.0, 0.7)]
    texts: list[list[list[int]]] = []
    for depth in (0, 3):
        with Runtime.load(TRAINED_HYBRID, MTP, **OPTIONS) as runtime:
            names = [runtime.submit(prompt, way) for prompt, way in zip(beginnings(2), ways, strict=True)]
            found = run_all(runtime, depth)
            texts.append([found[name] for name in names])
            if depth:
                assert runtime.summary()["eagle_speculation"]["mean_acceptance_length"] > 1.8
    assert texts[0] == texts[1]
