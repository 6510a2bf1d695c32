"""`lowlat inspect quality`: perplexity and divergence are those of transformers' logits, in windows of any length."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from cli_calls import answer, lowlat, refusal
from lowered import Pair
from tiny_models import make_target
from tokenizers import Tokenizer

from lowlat import Runtime
from lowlat.checkpoint.quantising import Quantiser
from lowlat.cli.options import bundled
from lowlat.errors import ConfigError, LowlatError
from lowlat.kernels.formats import dequantised
from lowlat.kernels.formats.int4 import int4_format
from lowlat.step.prefill import build_prefill
from lowlat.tools.quality import OPTIONS, Quality, measure_quality

TEXT = Path(__file__).parents[3] / "LICENSE"
WINDOW, NUM_TOKENS = 150, 320  # two whole windows of two chunks each, and a short one
COMMAND = ("inspect", "quality", "--text", TEXT, "--max-context", WINDOW + 1, "--max-tokens", NUM_TOKENS)


def log_probabilities(model: torch.nn.Module, windows: list[list[int]]) -> torch.Tensor:
    """transformers' logarithms of the probabilities of all tokens after each but the last of a window."""
    with torch.no_grad():
        rows = [model(torch.tensor([window])).logits[0, :-1] for window in windows]
    return torch.cat(rows).double().log_softmax(-1)


@pytest.mark.second
def test_figures_are_those_of_the_logits() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bundled("target"), dtype=torch.float32)
    tokens = Tokenizer.from_file(str(bundled("target") / "tokenizer.json")).encode(TEXT.read_text()).ids[:NUM_TOKENS]
    windows = [tokens[start : start + WINDOW] for start in range(0, NUM_TOKENS, WINDOW)]
    following = torch.tensor([token for window in windows for token in window[1:]])
    plain = log_probabilities(model, windows)
    for name, weight in model.named_parameters():
        if "_proj" in name:
            parts = int4_format(64, has_zeros=False).quantise(weight.detach().bfloat16())
            weight.data = dequantised("x.weight", {f"x.{part}": each for part, each in parts.items()})
    rounded = log_probabilities(model, windows)
    found = msgspec.convert(answer(*COMMAND, "--dtype", "float32", "--quantize", "int4", "--json"), Quality)
    assert (found.num_windows, found.num_predicted, found.window_tokens) == (3, NUM_TOKENS - 3, WINDOW)
    assert found.against is not None and found.divergence is not None
    assert (found.target.formats, found.against.formats) == (("int4_64",), ())
    losses = [-each.gather(1, following[:, None]).mean().item() for each in (rounded, plain)]
    assert [found.target.mean_log_loss, found.against.mean_log_loss] == pytest.approx(losses, abs=1e-4)
    assert found.target.perplexity == pytest.approx(math.exp(losses[0]), rel=1e-4)
    kl = (plain.exp() * (plain - rounded)).sum(-1).sort().values
    shown = found.divergence
    expected = (kl.mean().item(), kl[math.ceil(0.99 * len(kl)) - 1].item(), kl[-1].item())
    assert (shown.mean_kl, shown.p99_kl, shown.max_kl) == pytest.approx(expected, rel=2e-3)
    same = (plain.argmax(-1) == rounded.argmax(-1)).double().mean().item()
    assert shown.top1_agreement == pytest.approx(same, abs=0.004) and shown.top1_agreement < 1
    assert shown.log_loss_increase == pytest.approx(losses[0] - losses[1], abs=1e-4)


@pytest.mark.second
def test_a_target_is_itself_and_reports_have_two_forms(tmp_path: Path) -> None:
    short = (*COMMAND[:-1], 40)
    result = lowlat(*short, "--against", bundled("target"), "--json", tmp_path / "x.json")
    assert result.exit_code == 0 and not result.stdout
    found = msgspec.convert(json.loads((tmp_path / "x.json").read_text()), Quality)
    assert found.divergence is not None and found.target == found.against
    assert (found.divergence.max_kl, found.divergence.top1_agreement, found.divergence.log_loss_increase) == (0, 1, 0)
    shown = lowlat(*short).stdout
    assert f"{found.target.perplexity:.3f}" in shown and "against" not in shown
    shown = lowlat(*short, "--kv-cache-dtype", "fp8").stdout
    kept = next(line for line in shown.splitlines() if "KV cache" in line)
    assert kept.split()[2:] == ["fp8", "bfloat16"]
    assert f"{found.target.perplexity:.3f}" in shown and "99th percentile" in shown
    assert "there is no directory" in refusal(*short, "--json", tmp_path / "none" / "x.json")
    assert "it is a directory; name a file after --json" in refusal(*short, "--json", tmp_path)


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    other, text = tmp_path / "other", tmp_path / "text"
    shutil.copytree(bundled("target"), other)
    text.write_text("e")
    command = ("inspect", "quality", other, "--text", text)
    assert "leave none to predict" in refusal(*command)
    assert "no room for two tokens" in refusal(*command, "--max-context", 2)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:100]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    text.write_text("the tokens of a text")
    assert "give other tokens" in refusal(*command, "--against", bundled("target"))
    (other / "tokenizer.json").unlink()
    assert "needs tokenizer.json" in refusal(*command)
    text.write_bytes(b"\xff")
    assert "not UTF-8: byte 0" in refusal(*command)
    assert "no such file" in refusal(*command[:-1], tmp_path / "none")
    with pytest.raises(ConfigError, match="prompt_logits needs prefix_reuse off"):
        Runtime.load(other, device="cpu", prompt_logits=True)


def test_kernels_leave_the_logits_of_all_positions(tmp_path: Path) -> None:
    make_target(tmp_path, "llama", hidden_size=128, intermediate_size=256, head_dim=64, vocab_size=256)
    pair = Pair(tmp_path)
    geometry = replace(pair.geometry, prompt_logits=True, prefill_chunk=64)
    lowered = pair.lower_program(build_prefill(geometry))
    products = [call.arguments for call in lowered.calls if call.kernel.name.startswith("prefill_gemm")]
    logits = lowered.buffers["prompt_logits"]
    assert geometry.prefill_sizes == (64,) and logits.shape == (64, 256)
    assert any(isinstance(each, torch.Tensor) and each.data_ptr() == logits.data_ptr() for each in products[-1])


def test_logits_that_are_not_finite_are_no_figures() -> None:
    options = {**OPTIONS, "max_context": 64, "device": "cpu"}
    with Runtime.load(bundled("target"), **options) as runtime:
        executor: Any = runtime.executor
        executor._weights["norm.weight"][0] = torch.inf
        with pytest.raises(LowlatError, match="not finite"):
            measure_quality(runtime, None, "The President shall be")


@pytest.mark.parametrize(("widths", "group"), [((4096, 14336), 128), ((320, 832), 64), ((576, 1504), 32), ((8,), 32)])
def test_groups_are_the_largest_that_fit(widths: tuple[int, ...], group: int) -> None:
    assert Quantiser("int4").fitted(*widths).packed.name == f"int4_{group}"
