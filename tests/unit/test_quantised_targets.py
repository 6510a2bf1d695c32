"""Quantised targets run: logits of the numbers that they hold, the same bits with drafts; and rounding at load."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from lowered import Pair
from parity import check_parity
from quantised_layers import LAYOUTS, quantise_target
from recording import assert_same, prompt_of, traced
from safetensors.torch import load_file, save_file
from stages import later, staged, wide
from tiny_models import make_target

from lowlat import Runtime, SamplingParams
from lowlat.checkpoint.quantising import Quantiser, quantised, rounding_bytes
from lowlat.cli import cli
from lowlat.engine.memory.plan import memory_need, plan_rank
from lowlat.errors import ConfigError
from lowlat.kernels.formats import FP8, dequantised
from lowlat.kernels.formats.dense import PANEL_BYTES
from lowlat.kernels.formats.int4 import int4_format
from lowlat.kernels.toolchain.kernel import H200, Gpu, KernelCall
from lowlat.lowering.binding import LibraryCall
from lowlat.models.target import load_target
from lowlat.models.weight_plan import weight_plan
from lowlat.step.prefill import build_prefill

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 2}
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}
OPTIONS: dict[str, Any] = {"max_batch": 2, "max_context": 96, "block_size": 4, "prefill_chunk": 8} | {
    "device": "cpu",
    "dtype": "float32",
}
AMPERE = Gpu(108, 163 * 1024, (8, 0))
EXPERTS = ("fp8-channel", "fp8-block", "w4a16-32", "awq", "gptq-v1", "nvfp4")  # layouts of experts, one by one
FAMILIES = ("llama", "qwen3", "mistral", "qwen2")  # one for each layout in turn, so that every one is met
HYBRIDS: dict[str, dict[str, Any]] = dict.fromkeys(
    ("qwen3_5_moe_text", "qwen3_next"),
    {"linear_num_value_heads": 8, "linear_value_head_dim": 16, "moe_intermediate_size": 64}
    | {"shared_expert_intermediate_size": 64, "full_attention_interval": 2},
)


CASES = [
    *zip(itertools.cycle(FAMILIES), LAYOUTS, strict=False),
    *(("qwen3_moe", layout) for layout in EXPERTS),
    *((family, layout) for family in HYBRIDS for layout in EXPERTS),
]
FIRST = [case for case in CASES if case[0] in FAMILIES and case[1] in ("fp8-block", "w4a16-zeros", "nvfp4", "gptq-v1")]


def make_quantised(directory: Path, family: str, layout: str) -> Any:
    """A target in a layout, and transformers' model of the numbers that it holds."""
    model = make_target(directory, family, **SIZES, **HYBRIDS.get(family, {}))
    quantise_target(directory, layout, model)
    return model


@pytest.mark.parametrize(
    ("family", "layout"),
    staged(
        CASES, first=[FIRST[0], ("qwen3_moe", "fp8-block"), ("qwen3_5_moe_text", "awq")], second=[*FIRST, *CASES[::6]]
    ),
)
def test_logits_are_those_of_the_dequantised_model(family: str, layout: str, tmp_path: Path) -> None:
    model = make_quantised(tmp_path, family, layout)
    check_parity(tmp_path, model, prompt_of(21), 16, **OPTIONS)


ROUNDED = [
    *(("fp8", False, "qwen3", 14), ("int4", False, "qwen3", 14)),
    *(later("fp8", True, "qwen3", 14), wide("int4", True, "qwen3", 14), later("int4", False, "qwen3_moe", 38)),
]


@pytest.mark.parametrize(("kind", "tied", "family", "layers"), ROUNDED)
def test_rounding_at_load_is_rounding_in_files(kind: str, tied: bool, family: str, layers: int, tmp_path: Path) -> None:
    plain, out = tmp_path / "plain", tmp_path / "rounded"
    make_target(plain, family, tie_word_embeddings=tied, **{**WIDE, "intermediate_size": 192})
    arguments = ["quantize", str(plain), "--format", kind, "--out", str(out), "--json"]
    if tied:
        refused = CliRunner().invoke(cli, [*arguments, "--lm-head"])
        assert refused.exit_code == 2 and "leave --lm-head out" in refused.output and not out.exists()
    else:
        arguments.append("--lm-head")
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert report["layers"] == layers + (not tied) and report["new_bytes"] < report["old_bytes"] / 2
    shown = json.loads(CliRunner().invoke(cli, ["inspect", "model", str(out), "--json"]).output)
    assert shown["geometry"]["layer_formats"] == [{"fp8": "fp8", "int4": "int4_64"}[kind]]
    prompt, params = prompt_of(13), SamplingParams(max_tokens=12)
    with Runtime.load(out, **OPTIONS) as runtime:
        expected = traced(runtime, prompt, params)
    with Runtime.load(plain, **OPTIONS, quantize=kind, quantize_lm_head=not tied) as runtime:
        found = traced(runtime, prompt, params)
    assert_same(found, expected)
    with Runtime.load(plain, **OPTIONS, quantize=kind, quantize_lm_head=True) as runtime:
        other = traced(runtime, prompt, params)[1][len(prompt)]
        assert torch.equal(other, expected[1][len(prompt)]) is not tied
    again = CliRunner().invoke(cli, arguments)
    assert again.exit_code == 2 and "exists" in again.output


def test_what_loading_takes_is_planned(tmp_path: Path) -> None:
    """A GPU's memory for packing an LM head that is larger than the cache; the host's for rounding it."""
    make_target(tmp_path, "llama", **{**WIDE, "head_dim": 64})
    pair = Pair(tmp_path)
    rows = 327680
    pair.target = replace(pair.target, config=replace(pair.target.config, vocab_size=rows))
    large = torch.empty(rows, 128, dtype=torch.bfloat16, device="meta")
    parts = {
        "fp8": torch.empty(large.shape, dtype=torch.uint8, device="meta"),
        "fp8_scales": torch.empty(rows, 1, device="meta"),
    }
    rounded = {f"lm_head.{name}": each for name, each in parts.items()}
    plain = {name: each for name, each in pair.source.items() if name != "lm_head.weight"}
    for held, takes in (
        ({"lm_head.weight": large}, 2 * large.nbytes),
        (rounded, sum(each.nbytes for each in parts.values()) + PANEL_BYTES),
    ):
        need, _ = plan_rank([pair.program(0, 1)], plain | held, torch.device("cuda"), H200)
        assert need.total_bytes - need.weights_bytes == takes and need.loading_bytes > 0
    assert rounding_bytes(rounded) >= parts["fp8"].nbytes + parts["fp8_scales"].nbytes


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_experts_are_rounded_at_load_and_routers_are_not(family: str, tmp_path: Path) -> None:
    make_target(tmp_path, family, num_hidden_layers=2)
    prompt, params = prompt_of(9), SamplingParams(max_tokens=4)
    with Runtime.load(tmp_path, **OPTIONS, quantize="fp8") as runtime:
        assert len(traced(runtime, prompt, params)[0]) == 4
        plan, experts = weight_plan(runtime.model_config), runtime.model_config.experts
        plain = load_target(tmp_path, dtype="float32").weights["layers.1.experts.down.weight"]
        executor: Any = runtime.executor
        rounded = executor._weights["layers.1.experts.down.weight"]
    assert experts is not None and plan["layers.1.experts.down.fp8"] == (tuple(plain.shape), torch.uint8)
    assert {"layers.1.qkv.fp8", "layers.1.router.weight"} < set(plan)
    for expert in range(experts.num_experts):
        parts = {f"x.{part}": each for part, each in FP8.quantise(plain[expert]).items()}
        assert torch.equal(rounded[expert], dequantised("x.weight", parts))


def test_numbers_are_rounded_to_nearest() -> None:
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[3] = 0
    int4 = int4_format(128, has_zeros=False)
    for parts, steps in ((FP8.quantise(weight), 2.0**-4), (int4.quantise(weight), 0.52 / 7.5)):
        found = dequantised("x.weight", {f"x.{part}": each for part, each in parts.items()})
        scale = weight.float().unflatten(-1, (2, 128)).abs().amax(-1).repeat_interleave(128, -1)
        bound = steps * (weight.float().abs() if "fp8" in parts else scale) + scale * 2.0**-9
        assert ((found - weight.float()).abs() <= bound).all() and not found[3].any()
    exact = torch.randint(-7, 8, (4, 128)).float()
    exact[:, 0] = 7.5
    found = dequantised("x.weight", {f"x.{part}": each for part, each in int4.quantise(exact).items()})
    assert torch.equal(found[:, 1:], exact[:, 1:])
    with pytest.raises(ConfigError, match="FP8 cannot hold numbers that are not finite"):
        FP8.quantise(torch.tensor([[1.0, float("nan")]]))
    with pytest.raises(ConfigError, match=r"layers\.0\.o\.weight: INT4 cannot hold numbers that are not finite"):
        Quantiser("int4").parts("layers.0.o.weight", torch.full((1, 128), torch.inf))


def test_what_rounding_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    make_target(tmp_path / "narrow", "llama", **{**SIZES, "intermediate_size": 120})
    with pytest.raises(
        ConfigError, match=r"quantize 'int4' needs layers of a multiple of 32 inputs, and layers\.0\.down"
    ):
        Runtime.load(tmp_path / "narrow", **OPTIONS, quantize="int4")
    model = make_target(tmp_path / "done", "llama", **SIZES)
    quantise_target(tmp_path / "done", "awq", model)
    with pytest.raises(ConfigError, match="stored in int4_32_zeros, and quantize 'fp8' is for plain weights"):
        Runtime.load(tmp_path / "done", **OPTIONS, quantize="fp8")
    with pytest.raises(ConfigError, match="quantize_lm_head needs quantize"):
        Runtime.load(tmp_path / "narrow", **OPTIONS, quantize_lm_head=True)


def test_memory_counts_what_is_held(tmp_path: Path) -> None:
    model = make_target(tmp_path, "llama", **WIDE)
    quantise_target(tmp_path, "fp8-channel", model)
    target = load_target(tmp_path)
    plan = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, (shape, dtype) in weight_plan(target.config).items()
    }
    assert {name: (each.shape, each.dtype) for name, each in plan.items()} == {
        name: (each.shape, each.dtype) for name, each in target.weights.items()
    }
    with Runtime.load(tmp_path, **OPTIONS) as runtime:
        programs = [runtime.executor.program(bucket) for bucket in runtime.ladder.buckets]
        executor: Any = runtime.executor
        kept = sum(each.nbytes for each in executor._weights.values())
    assert memory_need(programs, target.weights, torch.device("cpu")).weights_bytes == kept
    stored = load_file(tmp_path / "model.safetensors")
    assert sum(each.nbytes for each in target.weights.values()) == sum(each.nbytes for each in stored.values())


@pytest.mark.parametrize(
    ("layout", "stored"),
    [
        *((layout, None) for layout in ("fp8-channel", "fp8-block", "w4a16-32", "w4a16-zeros", "awq", "nvfp4")),
        ("fp8-block", torch.bfloat16),
        ("w4a16-32", torch.float16),
    ],
)
def test_what_kernels_hold_is_what_is_planned(layout: str, stored: torch.dtype | None, tmp_path: Path) -> None:
    """Also where scales are stored in another dtype than those of the layout."""
    quantise_target(tmp_path, layout, make_target(tmp_path, "llama", **{**WIDE, "head_dim": 64}))
    if stored is not None:
        path = tmp_path / "model.safetensors"
        noise = 1 if stored == torch.bfloat16 else 1 + 2.0**-10
        tensors = load_file(path)
        scaled = {name: (each.float() * noise).to(stored) for name, each in tensors.items() if "weight_scale" in name}
        save_file(tensors | scaled, path)
    pair = Pair(tmp_path)
    programs = [pair.program(0, batch) for batch in (1, 8)]
    planned = plan_rank(programs, pair.source, torch.device("cuda"), H200).need.weights_bytes
    assert 0.995 * planned <= pair.weights.num_bytes <= 1.005 * planned
    names = {call.kernel.name for call in pair.lower(0, 1).calls if call.kernel.name.startswith("decode_gemm")}
    label = {"fp8": "fp8_", "w4a": "int4_", "awq": "int4_2", "nvf": "nvfp4_"}[layout[:3]]
    assert sum(label in name for name in names) == 4 and len(names) == 5
    prefill = build_prefill(replace(pair.geometry, prefill_chunk=64, max_context=128))
    for gpu, kernel in ((H200, f"prefill_gemm_{label}"), (AMPERE, f"unpack_{label}")):
        lowered = pair.lower_program(prefill, gpu)
        names_of = [call.kernel.name for call in lowered.calls if isinstance(call, KernelCall)]
        assert sum(name.startswith(kernel) for name in names_of) == 8
        libraries = [call for group in lowered.groups for call in group.calls if isinstance(call, LibraryCall)]
        assert sum(call.is_fallback for call in libraries) == (0 if gpu is H200 else 8)


def test_a_gpu_without_wgmma_unpacks_no_matrix_that_decode_alone_multiplies_by(tmp_path: Path) -> None:
    """The workspace is of the largest matrix of prefill, however large a rounded LM head is."""
    make_target(tmp_path, "llama", **{**WIDE, "num_hidden_layers": 1, "vocab_size": 2048})
    pair = Pair(tmp_path)
    pair.__dict__["source"] = quantised(pair.source, Quantiser("fp8", lm_head=True))
    lowered = pair.lower_program(build_prefill(pair.geometry), AMPERE)
    assert pair.weights.matrix("lm_head.weight").tile_format.name == "fp8"
    held = lowered.workspace("prefill.unpacked", (1,), torch.bfloat16)
    assert held.untyped_storage().nbytes() == 2 * 512 * 128
