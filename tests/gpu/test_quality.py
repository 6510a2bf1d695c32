"""`lowlat inspect quality` on a GPU: prefill's own logits of every position, by kernels."""

from pathlib import Path

import msgspec
import pytest
import torch
from cli_calls import answer

from lowlat.tools.quality import Quality

TEXT = Path(__file__).parents[2] / "LICENSE"


@pytest.mark.parametrize("how", [(), ("--quantize", "fp8"), ("--quantize", "int4", "--kv-cache-dtype", "fp8")])
def test_figures_of_a_gpu_are_those_of_the_reference(how: tuple[str, ...]) -> None:
    command = ("inspect", "quality", "--text", TEXT, "--max-tokens", 2000, "--max-context", 600, *how, "--json")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = msgspec.convert(answer(*command, "--device", "cuda"), Quality)
    assert torch.cuda.max_memory_allocated() - before < 1 << 30
    expected = msgspec.convert(answer(*command, "--device", "cpu"), Quality)
    assert found.executor == "graph" and found.num_predicted == expected.num_predicted
    assert found.target.mean_log_loss == pytest.approx(expected.target.mean_log_loss, rel=2e-3)
    if found.divergence is not None and expected.divergence is not None:
        assert found.divergence.mean_kl == pytest.approx(expected.divergence.mean_kl, rel=0.05)
        assert found.divergence.top1_agreement == pytest.approx(expected.divergence.top1_agreement, abs=0.02)
