"""Random experts in any format, rows that choose them in particular ways, and what the reference makes of them."""

from dataclasses import dataclass
from typing import Any

import torch

from lowlat.kernels.formats import MATRIX_FORMATS
from lowlat.kernels.formats.mxfp4 import MAX_SCALE
from lowlat.kernels.gemm.packing import gate_up_permutation
from lowlat.kernels.moe.packing import PackedExperts, pack_experts
from lowlat.kernels.reference.moe import experts as reference

LIMIT, ALPHA = 7.0, 1.702
# dense formats of experts, with scales that bf16 holds and others, zero points, one group a step and two
FORMATS = ("fp8", "fp8_block", "fp8_block narrow", "int4_64 narrow", "int4_64_zeros", "int4_32_zeros", "nvfp4")


@dataclass
class Experts:
    """Matrices of one product, plain and packed.

    matrices  what the reference takes: weight, or blocks and scales
    bias      None: they have none, and SwiGLU is plain
    """

    matrices: dict[str, Any]
    packed: PackedExperts
    bias: torch.Tensor | None
    order: torch.Tensor | None

    @property
    def packed_bias(self) -> torch.Tensor | None:
        """The bias in the order of the packed rows."""
        if self.bias is None or self.order is None:
            return self.bias
        return self.bias[:, self.order.to(self.bias.device)].contiguous()

    @property
    def limits(self) -> dict[str, Any]:
        """The parameters of clamped SwiGLU, or none."""
        return {} if self.bias is None else {"limit": LIMIT, "alpha": ALPHA}


def make_experts(
    num_experts: int, rows: int, columns: int, *, quantised: bool | str, gated: bool, device: str = "cpu",
    scales: tuple[int, int] = (112, 122), seed: int | None = None, biased: bool = True,
) -> Experts:  # fmt: skip
    """E matrices [rows, columns] whose products with inputs about one stay about one, for common sizes.

    quantised  True: MXFP4; or a dense format by name, after which " narrow" means scales that bf16 holds
    """
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    kinds: dict[str, Any] = {"device": device, "generator": generator}
    order = gate_up_permutation(rows // 2) if gated else None
    bias = torch.randn(num_experts, rows, **kinds).bfloat16() if biased else None
    if isinstance(quantised, str):
        name, _, narrow = quantised.partition(" ")
        parts, matrix = _dense_parts(name, (num_experts, rows, columns), bool(narrow), kinds)
        return Experts({"weight": matrix}, pack_experts(parts, order=order), bias, order)
    if quantised:
        shape = (num_experts, rows, columns // 32)
        matrices = {
            "blocks": torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, **kinds),
            "scales": torch.randint(scales[0], scales[1] + 1, shape, dtype=torch.uint8, **kinds),
        }
    else:
        weight = torch.randn(num_experts, rows, columns, **kinds) * columns**-0.5
        matrices = {"weight": weight.bfloat16()}
    return Experts(matrices, pack_experts(matrices, order=order), bias, order)


def _dense_parts(
    name: str, shape: tuple[int, int, int], narrow: bool, kinds: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random parts of a dense format, and what they stand for in float32."""
    parts, weight_format = {}, MATRIX_FORMATS[name]
    for part, (each, dtype) in weight_format.specs(*shape[1:], torch.bfloat16).items():
        whole = (shape[0], *each)
        if dtype == torch.float32:
            drawn = (torch.rand(whole, **kinds) + 0.5) * (shape[2] ** -0.5 / (4 if name.startswith("int4") else 64))
            parts[part] = drawn.bfloat16().float() if narrow else drawn
        elif part.endswith("zeros"):
            parts[part] = torch.randint(4, 12, whole, dtype=dtype, **kinds)
        elif part == "nvfp4_scales":
            parts[part] = torch.randint(0x48, 0x60, whole, dtype=dtype, **kinds)
        else:
            codes = torch.randint(256, whole, dtype=dtype, **kinds)
            parts[part] = torch.where((codes & 127) >= 0x68, codes & 0xCF, codes) if part == "fp8" else codes
    return parts, weight_format.dequantise(parts, torch.float32)


def all_codes_and_scales(device: str = "cpu") -> PackedExperts:
    """One expert [MAX_SCALE, 64]: row r has scale r + 1, and every code in every place of a word in turn."""
    places = torch.arange(64, device=device)
    codes = (places + torch.arange(MAX_SCALE, device=device)[:, None] + places // 16).remainder(16)
    blocks = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).view(1, MAX_SCALE, 2, 16)
    scales = torch.arange(1, MAX_SCALE + 1, dtype=torch.uint8, device=device)[:, None].repeat(1, 2)
    return pack_experts({"blocks": blocks, "scales": scales[None]})


def choices(kind: str, rows: int, top_k: int, num_experts: int, device: str = "cpu") -> torch.Tensor:
    """Expert ids [M, k] int32: "random", "shared" (all rows choose the same), "dead" (most rows), "none" or "apart"
    (as many different experts as there are)."""
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(rows)]).int()
    if kind == "shared":
        ids = ids[:1].expand(rows, -1).clone()
        ids = torch.stack([row[torch.randperm(top_k)] for row in ids])
    elif kind == "apart":
        ids = (torch.arange(rows * top_k) % num_experts).view(rows, top_k).int()
    elif kind == "dead":
        ids[torch.arange(rows) % 3 != 1] = -1
    elif kind == "none":
        ids[:] = -1
    return ids.to(device)


def want_gate_up(experts: Experts, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The reference's activations [M, k, I]."""
    out = torch.empty(*ids.shape, experts.packed.rows // 2, dtype=x.dtype, device=x.device)
    reference.experts_gate_up(x, ids, experts.bias, **experts.matrices, out=out, **experts.limits)
    return out


def shares_of(ids: torch.Tensor) -> torch.Tensor:
    """Shares [M, k] float32 that sum to 1 and differ from pair to pair; the same for the same ids."""
    weights = (ids.float() * 0.37).sin() + 1.5
    return weights / weights.sum(dim=1, keepdim=True)


def want_down(experts: Experts, activated: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The reference's weighed products [M, k, N] float32, by `shares_of`; zero for dead pairs."""
    rows, top_k = ids.shape
    parts = []
    for k in range(top_k):
        out = torch.empty(rows, experts.packed.rows, device=activated.device)
        reference.experts_down(
            activated[:, k : k + 1].contiguous(), ids[:, k : k + 1].contiguous(),
            shares_of(ids)[:, k : k + 1].contiguous(), experts.bias, **experts.matrices, out=out,
        )  # fmt: skip
        parts.append(out)
    return torch.stack(parts, 1)
