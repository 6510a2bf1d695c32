"""`lowlat doctor --fidelity`: a sound target is as close to FP32 as transformers, and defects are seen."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stages import later, wide
from tiny_models import make_target

from lowlat.engine.runtime import Runtime
from lowlat.errors import ConfigError
from lowlat.kernels.reference.attention import attention
from lowlat.kernels.reference.gemm import linear
from lowlat.options.speculative import SpeculativeConfig
from lowlat.tools.bootstrap import block_sums, bootstrap
from lowlat.tools.exactness import Fidelity, measure_fidelity
from lowlat.tools.exactness.fidelity import Compared, Rows, compared

OPTIONS: dict[str, Any] = {"device": "cpu", "max_context": 256}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=2)


def rounded_target(directory: Path, family: str) -> Path:
    """A random target whose files hold bfloat16."""
    make_target(directory, family)
    file = directory / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rounded_target(tmp_path_factory.mktemp("target"), "llama")


def measure(target: Path, **options: Any) -> Fidelity:
    prompts = torch.randint(0, 97, (6, 48), generator=torch.Generator().manual_seed(1)).tolist()

    def load(target: Path, speculative: SpeculativeConfig | None, _: int | None, **given: Any) -> Runtime:
        return Runtime.load(target, speculative, **given)

    given = {**OPTIONS, "dtype": "bfloat16", **options}
    return measure_fidelity(target, NGRAM, prompts, max_tokens=24, load=load, **given)


def rounds_sums(patch: pytest.MonkeyPatch) -> None:
    """Products of both halves of K are rounded before they are added."""
    block = linear.linear_block

    def wrong(x: torch.Tensor, weight: torch.Tensor, row_block: int) -> torch.Tensor:
        half = x.shape[1] // 2
        parts = [(x[:, :half], weight[:, :half]), (x[:, half:], weight[:, half:])]
        return sum(block(a.contiguous(), b.contiguous(), row_block).bfloat16() for a, b in parts).float()  # type: ignore[union-attr]

    patch.setattr(linear, "linear_block", wrong)


def scales_steps(patch: pytest.MonkeyPatch) -> None:
    """Scores of a step are a tenth too large; those of prefill are right."""
    attend = attention.attend_rows
    patch.setattr(
        attention, "attend_rows", lambda *given, scale, **options: attend(*given, scale=1.1 * scale, **options)
    )


@pytest.mark.second
def test_a_sound_target_is_as_close_as_transformers(target: Path) -> None:
    found = measure(target)
    prompts, steps = found.rows
    assert found.faithful and found.verdict.startswith("as close to FP32 as transformers in bfloat16")
    assert (prompts.name, prompts.positions, steps.name, steps.positions) == ("prompts", 6 * 48 - 2, "steps", 6 * 24)
    for rows in found.rows:
        assert 0 < rows.kl.lowlat < rows.kl.transformers < 1e-3
        assert rows.kl.lower <= rows.kl.ratio <= rows.kl.upper <= 1
        assert max(rows.nll) - min(rows.nll) < 0.01
    assert found.to_dict()["rows"][0]["kl"]["upper"] == prompts.kl.upper


@pytest.mark.parametrize(("plant", "red"), [later(rounds_sums, {"prompts", "steps"}), wide(scales_steps, {"steps"})])
def test_a_planted_defect_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], red: set[str], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = measure(target)
    assert {rows.name for rows in found.rows if not rows.kl.met} == red
    assert not found.faithful and "farther from FP32 than transformers" in found.verdict


@pytest.mark.wide
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_5_moe_text", "gemma3_text"])
def test_no_family_is_farther_from_fp32(family: str, tmp_path: Path) -> None:
    """Where experts are chosen a few positions decide, so that random weights may leave it undecided."""
    found = measure(rounded_target(tmp_path, family))
    assert all(each.lower <= 1 for rows in found.rows for each in (rows.kl, rows.nll_error)), found.verdict


def test_what_cannot_be_said_is_refused(target: Path) -> None:
    with pytest.raises(ConfigError, match="computed in float32"):
        measure(target, dtype="float32")
    with pytest.raises(ConfigError, match="100 positions say too little"):
        compared(torch.ones(100), torch.ones(100))
    wide = Compared(1.0, 1.0, 1.0, 0.8, 1.2)
    found = Fidelity("cpu", "reference", "0" * 16, "bfloat16", "5", [Rows("steps", 9, wide, wide, (1.0, 1.0, 1.0))])
    assert "undecided" in found.verdict and not found.faithful


def test_intervals_hold_what_is_known() -> None:
    """The mean of 400 normal numbers has an error of a twentieth, and an interval about four of these wide."""
    values = torch.randn(400, generator=torch.Generator().manual_seed(3)).double()
    low, high = bootstrap(400, lambda drawn: values[drawn].mean(1))
    assert low < float(values.mean()) < high and 0.16 < high - low < 0.24
    assert block_sums(torch.arange(5.0), 2).tolist() == [1, 5, 4]
    with pytest.raises(ValueError, match="at least one sample"):
        bootstrap(0, lambda drawn: drawn)
