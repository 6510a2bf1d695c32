"""Which executor a model gets: kernels where they cover it; torch's operations, or a refusal by name, elsewhere."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lowlat
from lowlat.errors import ConfigError, ShapeError
from lowlat.executors.make import settle_executor, uncovered
from lowlat.host.devices import DeviceChoice
from lowlat.kernels.gemm.packing import gate_up_permutation
from lowlat.kernels.rows.norm import check_width
from lowlat.kernels.sampling.select import count_chunks
from lowlat.models.geometry import DraftConfig, ExpertsConfig, ModelConfig
from lowlat.models.target import load_target
from lowlat.speculators.eagle3.weights import load_draft_model

DEMO = Path(lowlat.__file__).parent / "demo"
EXPERTS = ExpertsConfig(4, 2, 7.0, 1.7, "mxfp4")
CARD = DeviceChoice(torch.device("cuda", 0), "graph", "a usable NVIDIA card is present")


@pytest.fixture(scope="module")
def known() -> tuple[ModelConfig, DraftConfig]:
    """The bundled pair's geometry, which the kernels cover."""
    target = load_target(DEMO / "target", dtype="bfloat16")
    return target.config, load_draft_model(DEMO / "head", target.config).config


def changed(
    known: tuple[ModelConfig, DraftConfig], target: dict[str, Any], head: dict[str, Any] | None
) -> tuple[ModelConfig, DraftConfig | None]:
    return replace(known[0], **target), None if head is None else replace(known[1], **head)


@pytest.mark.parametrize(
    ("target", "head", "problem"),
    [
        ({"dtype": "float32"}, {}, "the kernels compute in bfloat16 and dtype is float32"),
        ({"experts": replace(EXPERTS, num_experts=257)}, None, "at most 256 experts and the target's layers have 257"),
        (
            {"experts": replace(EXPERTS, num_experts=32, num_experts_per_token=9)},
            {},
            "at most 8 experts a token and the target's tokens choose 9",
        ),
        ({"experts": EXPERTS, "hidden_size": 6176}, None, "a hidden size of at most 6144 where experts are chosen"),
        ({"experts": EXPERTS, "intermediate_size": 72}, {}, "multiples of 32 as widths of MXFP4"),
        ({"head_dim": 8}, None, "the target's have 8"),
        ({"head_dim": 8}, {}, "heads of 64 or 128 dimensions and the target's have 8"),
        ({}, {"head_dim": 96}, "the head's have 96"),
        ({"hidden_size": 60}, {}, "multiples of 8 up to 65536 as widths and the target's hidden size is 60"),
        ({"intermediate_size": 65544}, {}, "the target's FFN's width is 65544"),
        ({}, {"intermediate_size": 100}, "the head's FFN's width is 100"),
        ({"vocab_size": 262145}, None, "vocabularies of at most 262144 and the target's has 262145"),
    ],
)
def test_what_the_kernels_do_not_run_is_named_with_the_way_out(
    target: dict[str, Any], head: dict[str, Any] | None, problem: str, known: tuple[ModelConfig, DraftConfig]
) -> None:
    config, draft_config = changed(known, target, head)
    assert problem in (uncovered(config, draft_config) or "")
    for asked in ("graph", "eager"):
        with pytest.raises(ConfigError, match=f"executor '{asked}' cannot run.*{problem}.*use 'reference' or 'auto'"):
            settle_executor(replace(CARD, executor=asked), asked, config, draft_config)
    settled = settle_executor(CARD, "auto", config, draft_config)
    assert (settled.executor, settled.loud, settled.device) == ("reference", True, CARD.device)
    assert problem in settled.reason
    reference = replace(CARD, executor="reference")
    assert settle_executor(reference, "reference", config, draft_config) is reference


@pytest.mark.parametrize("head", [None, {}, {"head_dim": 128}])
def test_what_the_kernels_run_stays_with_them(
    head: dict[str, Any] | None, known: tuple[ModelConfig, DraftConfig]
) -> None:
    config, draft_config = changed(known, {}, head)
    assert uncovered(config, draft_config) is None
    assert settle_executor(CARD, "auto", config, draft_config) is CARD


def test_the_limits_are_those_of_the_kernels(known: tuple[ModelConfig, DraftConfig]) -> None:
    assert count_chunks("logits", 262144)
    with pytest.raises(ShapeError, match="262144"):
        count_chunks("logits", 262145)
    check_width(65536)
    for width in (65544, 60):
        with pytest.raises(ShapeError, match=r"multiple of 8 elements, at most 65536"):
            check_width(width)
    with pytest.raises(ShapeError, match="multiple of 8"):
        gate_up_permutation(100)


@pytest.mark.parametrize("size", [8, 24, 512])
def test_kv_blocks_that_the_kernels_do_not_take_are_named(size: int, known: tuple[ModelConfig, DraftConfig]) -> None:
    with pytest.raises(ConfigError, match=f"block_size is {size}"):
        settle_executor(replace(CARD, executor="graph"), "graph", *known, size)
    settled = settle_executor(CARD, "auto", *known, size)
    assert (settled.executor, settled.loud) == ("reference", True)
