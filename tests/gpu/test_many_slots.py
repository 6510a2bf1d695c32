"""More than eight slots on a GPU: GEMMs whose blocks share rows, MoE launches of many rows, and whole runtimes, which
give the bits and tokens of others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_cases import Poisoned, make_moe, make_topk_routing
from quantised_layers import random_parts
from recording import prompt_of, run_all
from selection_cases import best_of
from tiny_models import KERNEL_HYBRID, make_pair

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.executors.launcher import Launcher
from lowlat.kernels.formats import DENSE_FORMATS
from lowlat.kernels.formats.dense import pack_matrix
from lowlat.kernels.gemm.decode.gemm import PartialArgmax, decode_gemm
from lowlat.kernels.gemm.decode.plan import FLOAT32, DecodeGemmShape
from lowlat.kernels.gemm.decode.shared_rows_plan import shared_plans
from lowlat.kernels.gemm.packing import gate_up_permutation, pack
from lowlat.kernels.moe.decode.experts import experts_down, experts_gate_up
from lowlat.kernels.moe.decode.mlp import experts_mlp
from lowlat.kernels.moe.topk_routing import TopKRouting
from lowlat.kernels.sampling.select import FINITE
from lowlat.kernels.toolchain.kernel import H200

ROWS = (33, 40, 64, 65, 100, 128, 200, 256)
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64}
EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 8}
FAMILIES = {
    "llama": SIZES,
    "gpt_oss": SIZES,
    "qwen3_moe": SIZES | {"moe_intermediate_size": 64, "num_local_experts": 8},
    "qwen3_5_moe_text": KERNEL_HYBRID | {"hidden_size": 128, "intermediate_size": 192} | EXPERTS,
}
OPTIONS: dict[str, Any] = {"max_context": 256, "block_size": 16, "prefill_chunk": 32, "device": "cuda"}
OPTIONS |= {"dtype": "bfloat16"}
MODES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "logprobs": 3},
    {"temperature": 0.8, "repetition_penalty": 1.3, "max_draft_tokens": 2},
]


def _random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def _both(launcher: Launcher, out: torch.Tensor, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of a GEMM whose blocks share rows and of the usual one."""
    found = [torch.full_like(out, torch.nan) for _ in range(2)]
    for each, shares in zip(found, (True, False), strict=True):
        launcher.run(*decode_gemm(**given, out=each, shares=shares, gpu=launcher.gpu))
    return found[0], found[1]


@pytest.mark.parametrize("name", ["bf16", *DENSE_FORMATS])
@pytest.mark.parametrize(("width", "depth"), [(104, 128), (6144, 4096), (4096, 14336), (512, 384)])
def test_shared_rows_have_the_bits_of_others(launcher: Launcher, name: str, width: int, depth: int) -> None:
    """Every number of rows and plan, in every format; rows that others hold NaN next to."""
    if name == "bf16":
        weight = pack(_random(width, depth, scale=depth**-0.5))
    else:
        weight = pack_matrix(DENSE_FORMATS[name], random_parts(name, width, depth, wide=False, device="cuda"))
    bias = _random(width)
    for rows in ROWS:
        x = _random(rows, depth)
        x[rows // 3] = torch.nan
        out = torch.empty(rows, width, device="cuda")
        found, want = _both(launcher, out, x=x, weight=weight, bias=bias)
        assert torch.equal(found.view(torch.int32), want.view(torch.int32)), rows
    shape = DecodeGemmShape(width, depth, FLOAT32, True, False, weights=weight.tile_format)
    for rows in (50, 120):
        x, out, want = _random(rows, depth), *(torch.full((rows, width), torch.nan, device="cuda") for _ in range(2))
        launcher.run(*decode_gemm(x=x, weight=weight, bias=bias, out=want))
        for plan in shared_plans(rows, shape, H200):
            launcher.run(*decode_gemm(x=x, weight=weight, bias=bias, out=out.fill_(torch.nan), plan=plan))
            assert torch.equal(out, want), plan


def test_epilogues_have_the_bits_of_others(launcher: Launcher) -> None:
    """Residuals, activations with dead rows, and best pairs, of every number of rows."""
    width, depth = 2048, 1096
    weight = _random(width, depth, scale=depth**-0.5)
    plain, gated = pack(weight), pack(weight, gate_up_permutation(width // 2))
    for rows in ROWS:
        x, live = _random(rows, depth), (torch.arange(rows, device="cuda") % 7 != 3).to(torch.uint8)
        added: dict[str, Any] = {"x": x, "weight": plain, "residual": _random(rows, width)}
        activated: dict[str, Any] = {"x": x, "weight": gated, "activation": "silu", "row_live": live}
        for out, given in ((_random(rows, width), added), (_random(rows, width // 2), activated)):
            found, want = _both(launcher, out, **given)
            assert bool(want.isfinite().all()) and torch.equal(found, want), rows
        pairs = [torch.full((rows, 132, 2), 77, dtype=torch.int32, device="cuda") for _ in range(2)]
        outs = [torch.full((rows, width), torch.nan, device="cuda") for _ in range(2)]
        for best, out, shares in zip(pairs, outs, (True, False), strict=True):
            own = PartialArgmax(best, FINITE)
            launcher.run(*decode_gemm(x=x, weight=plain, out=out, best=own, shares=shares, gpu=launcher.gpu))
        assert torch.equal(*outs) and all(map(torch.equal, best_of(pairs[0]), best_of(pairs[1])))


@pytest.mark.parametrize(("quantised", "top_k"), [(True, 4), (False, 8), (False, 9)])
def test_moe_launches_of_many_rows_have_the_bits_of_others(launcher: Launcher, quantised: bool, top_k: int) -> None:
    """Both GEMMs in one launch, and each in its own; dead rows among them."""
    moe = make_moe(32, 2080, 320, quantised=quantised, device="cuda")
    for rows in (40, 96, 128):
        x, residual = moe.rows(rows), _random(rows, 2080)
        made = make_topk_routing("dead", rows, top_k, 32, "cuda")
        results = []
        for many in (True, False):
            found = moe.arguments(x, top_k) | {"residual": residual}
            routing = TopKRouting(made.logits.clone(), made.row_live, made.over_all, made.shared)
            launcher.run(*experts_mlp(routing=routing, many=many, gpu=launcher.gpu, **found))
            results.append(found)
        for name in ("expert_ids", "expert_weights", "activated", "partials", "total"):
            assert torch.equal(results[0][name], results[1][name]), (rows, name)
        moe.check(results[0])
        _check_alone(launcher, results[0])


def _check_alone(launcher: Launcher, found: dict[str, Any]) -> None:
    """Each GEMM in a launch of its own, of many rows and of few."""
    ids, outs = found["expert_ids"], []
    limits: dict[str, Any] = {name: found[name] for name in ("limit", "alpha") if name in found}
    for many in (True, False):
        activated = torch.full_like(found["activated"], torch.nan)
        out = torch.full_like(found["total"], torch.nan, dtype=torch.float32)
        first: dict[str, Any] = {"experts": found["gate_up"], "bias": found["gate_up_bias"], "out": activated, **limits}
        second: dict[str, Any] = {
            "experts": found["down"],
            "bias": found["down_bias"],
            "out": out,
            "workspace": Poisoned("cuda"),
        }
        launcher.run(
            *experts_gate_up(found["x"], ids, **first, many=many, gpu=launcher.gpu),
            *experts_down(activated, ids, found["expert_weights"], **second, many=many, gpu=launcher.gpu),
        )
        outs.append((activated, out))
    assert all(map(torch.equal, *outs))
    assert torch.equal(outs[0][0], found["activated"])


def tokens_of(runtime: Runtime, count: int) -> list[list[int]]:
    """The tokens of so many requests, of all modes, side by side as there are slots."""
    names = [
        runtime.submit(
            prompt_of(5 + n % 23, 70 + n),
            SamplingParams(seed=n, max_tokens=40 + n, ignore_eos=True, **MODES[n % len(MODES)]),
        )
        for n in range(count)
    ]
    found = run_all(runtime)
    return [found[name] for name in names]


@pytest.mark.parametrize(
    ("family", "slots", "drafts", "more"),
    [
        ("llama", 16, 7, {"executor": "graph"}),
        ("llama", 32, 3, {"executor": "graph"}),
        ("llama", 32, 3, {"executor": "eager"}),
        ("llama", 32, 3, {"executor": "eager", "fuse": False}),
        ("llama", 32, 3, {"executor": "graph", "device_loop": True}),
        ("llama", 32, "auto", {"executor": "graph"}),
        ("llama", 32, 3, {"executor": "graph", "quantize": "fp8"}),
        ("llama", 32, 3, {"executor": "graph", "kv_cache_dtype": "fp8"}),
        ("gpt_oss", 32, 3, {"executor": "graph"}),
        ("qwen3_moe", 24, 4, {"executor": "graph"}),
        ("qwen3_5_moe_text", 32, 3, {"executor": "graph"}),
    ],
)
def test_many_slots_have_the_tokens_of_one(
    family: str, slots: int, drafts: Any, more: dict[str, Any], tmp_path: Path
) -> None:
    """Next to each other with drafts, and one after the other without: the same slots decide attention's splits."""
    pair = make_pair(tmp_path, family, **FAMILIES[family])
    sizes = {**OPTIONS, "max_batch": slots, **more}
    with Runtime.load(pair.target, **sizes) as runtime:
        expected = [tokens_of(runtime, slots + 4)]
    config = SpeculativeConfig(model=pair.head, num_speculative_tokens=drafts, strict=True)
    with Runtime.load(pair.target, config, **sizes) as runtime:
        expected.append(tokens_of(runtime, slots + 4))
        alone = [run_all_of(runtime, n) for n in (0, 3, slots)]
        stats = runtime.summary()["eagle_speculation"]
    assert expected[0] == expected[1] and stats["total_accepted_tokens"] > 0
    assert alone == [expected[0][n] for n in (0, 3, slots)]


def run_all_of(runtime: Runtime, n: int) -> list[int]:
    """The tokens of one of these requests, alone, without drafts."""
    sampling = SamplingParams(seed=n, max_tokens=40 + n, ignore_eos=True, **MODES[n % len(MODES)])
    name = runtime.submit(prompt_of(5 + n % 23, 70 + n), sampling)
    return run_all(runtime, 0)[name]
