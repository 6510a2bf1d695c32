"""Random mixtures of experts, rows that choose them in particular ways, and their expected results."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from expert_cases import Experts, choices, make_experts, want_gate_up

from lowlat.kernels.gemm.packing import gate_up_permutation
from lowlat.kernels.moe.decode.mlp_plan import MlpPlan, plan_mlp
from lowlat.kernels.moe.packing import pack_experts, shape_of, unpack_expert
from lowlat.kernels.moe.plan import DOWN, GATE_UP, rows_a_launch
from lowlat.kernels.moe.topk_routing import TopKRouting
from lowlat.kernels.reference.moe import experts as reference
from lowlat.kernels.toolchain.kernel import Gpu, WorkspaceShape

PASSES: dict[str, Any] = {
    "limit": 3e38,
    "alpha": 2.0**127,
}  # SwiGLU of an up value of 0 is the gate where that is positive, else 0
ONE = 2  # the code of 1.0


class Poisoned:
    """Workspaces that hold NaN, or numbers that are no index; one name is one memory while requests do not grow.

    asked  every request
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self._device = device
        self._held: dict[str, torch.Tensor] = {}
        self.asked: list[WorkspaceShape] = []

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.asked.append((name, shape, dtype))
        count = math.prod(shape)
        if name not in self._held or self._held[name].numel() < count:
            rest = torch.nan if dtype.is_floating_point else -77
            self._held[name] = torch.full((count,), rest, dtype=dtype, device=self._device)
        return self._held[name][:count].view(shape)


@dataclass
class Moe:
    """Experts of both products."""

    up: Experts
    down: Experts

    def rows(self, count: int) -> torch.Tensor:
        """Random rows [M, K]."""
        return torch.randn(count, self.up.packed.columns, device=self.up.packed.words.device).bfloat16()

    def arguments(self, x: torch.Tensor, top_k: int) -> dict[str, Any]:
        """Return the arguments of a launch over rows x [M, K] but for routing; residuals are random, outputs empty."""
        rows, inner, hidden, device = x.shape[0], self.down.packed.columns, self.down.packed.rows, x.device
        return {
            "gate_up": self.up.packed,
            "gate_up_bias": self.up.packed_bias,
            "down": self.down.packed,
            "down_bias": self.down.bias,
            "x": x,
            "residual": torch.randn(rows, hidden, device=device).bfloat16(),
            "total": torch.full((rows, hidden), torch.nan, device=device).bfloat16(),
            "expert_ids": torch.full((rows, top_k), 77, dtype=torch.int32, device=device),
            "expert_weights": torch.full((rows, top_k), torch.nan, device=device),
            "activated": awaited(rows, top_k, inner, dtype=torch.bfloat16, device=device),
            "partials": awaited(rows, top_k, hidden, dtype=torch.float32, device=device),
            **self.up.limits,
        }

    def plan(
        self, rows: int, top_k: int, gpu: Gpu, *, warps: int | None = None, stages: int | None = None, **changes: Any
    ) -> MlpPlan:
        """`plan_mlp`'s, with changes of both products' plans; parts stay as long as they are, at most."""
        up, down = (
            shape_of(kind, each.packed, top_k, biased=each.bias is not None, clamped=kind == DOWN or bool(each.limits))
            for kind, each in ((GATE_UP, self.up), (DOWN, self.down))
        )
        pair = plan_mlp(min(rows, rows_a_launch(top_k)), up, down, gpu, warps=warps, stages=stages)
        part = changes.pop("part", pair.up_plan.part + pair.down_plan.part)
        first, second = (replace(each, part=min(part, each.part), **changes) for each in (pair.up_plan, pair.down_plan))
        return replace(pair, up_plan=first, down_plan=second)

    def check(self, found: dict[str, Any]) -> None:
        """Of the experts that were chosen: activations are the reference's, their weighed products float64's, the total
        their sum bit for bit; zeros where dead, NaN where shares are."""
        ids, shares, activated, partials = (
            found[name] for name in ("expert_ids", "expert_weights", "activated", "partials")
        )
        live, sound = ids >= 0, shares.isfinite()
        assert not activated[~live].any() and not partials[~live].any()
        torch.testing.assert_close(activated, want_gate_up(self.up, found["x"], ids), rtol=2**-7, atol=1e-4)
        want = self._weighed(activated, ids, shares)
        assert partials[~sound].isnan().all() and partials[sound].isfinite().all()
        assert bool(((partials - want)[sound].norm(dim=-1) <= 1e-5 * want[sound].norm(dim=-1)).all())
        added = torch.zeros_like(found["residual"], dtype=torch.float32)
        for k in range(ids.shape[1]):
            added += partials[:, k]
        wanted = (found["residual"].float() + added).bfloat16()
        torch.testing.assert_close(found["total"], wanted, rtol=0, atol=0, equal_nan=True)

    def _weighed(self, activated: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Share times product and bias, in float64, of every pair; 0 where dead."""
        out = torch.zeros(*ids.shape, self.down.packed.rows, dtype=torch.float64, device=activated.device)
        for expert in ids[ids >= 0].unique().tolist():
            here, weight = ids == expert, self.down.matrices.get("weight")
            matrix = unpack_expert(self.down.packed, expert) if weight is None else weight[expert]
            out[here] = activated[here].double() @ matrix.double().t()
            if self.down.bias is not None:
                out[here] += self.down.bias[expert].double()
        return out * shares.double()[..., None]


def make_moe(
    num_experts: int, hidden: int, inner: int, *, quantised: bool | str = True, device: str = "cpu", **more: Any
) -> Moe:
    """Random experts of both products; `make_experts` takes more."""
    up, down = (
        make_experts(num_experts, *shape, quantised=quantised, gated=gated, device=device, **more)
        for shape, gated in (((2 * inner, hidden), True), ((hidden, inner), False))
    )
    return Moe(up, down)


def of_codes(codes: torch.Tensor, scale: int, *, gated: bool) -> Experts:
    """One expert of these codes [rows, columns], all with one scale, without biases.

    gated  they are the gates; as many up rows are zero
    """
    if gated:
        codes = torch.cat([codes, torch.zeros_like(codes)])
    rows, columns = codes.shape
    blocks = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).view(1, rows, columns // 32, 16)
    scales = torch.full((1, rows, columns // 32), scale, dtype=torch.uint8, device=codes.device)
    matrices, order = {"blocks": blocks, "scales": scales}, gate_up_permutation(rows // 2) if gated else None
    bias = torch.zeros(1, rows, device=codes.device).bfloat16()
    return Experts(matrices, pack_experts(matrices, order=order), bias, order)


def passing(width: int, device: str = "cpu") -> Experts:
    """One expert whose activations are its inputs, where they are positive, else 0, with `PASSES`."""
    return of_codes(torch.eye(width, dtype=torch.uint8, device=device) * ONE, 127, gated=True)


def make_logits(kind: str, rows: int, num_experts: int) -> torch.Tensor:
    """Logits [M, E] float32: "random", "shared" (all rows the same), "ties" (few values, zeros of both signs), or "odd"
    (NaN and infinities among few values)."""
    logits = torch.randn(rows, num_experts) * 3
    if kind == "shared":
        logits[:] = logits[0].clone()
    elif kind != "random":
        few = [0.0, -0.0, 1.5, -2.0] + ([torch.nan, torch.inf, -torch.inf] if kind == "odd" else [])
        logits = torch.tensor(few)[torch.randint(len(few), (rows, num_experts))]
    return logits


def logits_of(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Logits [M, E] by which rows choose these ids [M, k] in their order, with shares that are not small."""
    top_k = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    return torch.zeros(ids.shape[0], num_experts, device=ids.device).scatter_(1, ids.long(), 9 - top_k / 4)


def make_topk_routing(
    kind: str, rows: int, top_k: int, num_experts: int, device: str = "cpu", *, shared: bool = False
) -> TopKRouting:
    """By logits as `make_logits` has them; random ones, where a third of the rows is live ("dead") or no row ("none");
    or such that choose as many different experts as there are ("apart").

    shared  the last of the experts is every row's last one
    """
    live = None
    if kind in ("dead", "none"):
        live = ((torch.arange(rows) % 3 == 1) & (kind == "dead")).to(torch.uint8).view(1, rows).to(device)
    if kind == "apart":
        others = choices("apart", rows, top_k - shared, num_experts - shared)
        logits = torch.cat([logits_of(others, num_experts - shared), torch.randn(rows, int(shared))], 1)
    else:
        logits = make_logits("random" if live is not None else kind, rows, num_experts)
    return TopKRouting(logits.to(device), live, shared=shared)


def want_routing(routing: TopKRouting, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's ids and shares [M, k], on the CPU: those of a router of nothing but biases."""
    rows, num_experts = routing.logits.shape
    ids, shares = torch.full((rows, top_k), 77, dtype=torch.int32), torch.full((rows, top_k), torch.nan)
    nothing = torch.zeros(1, 8), torch.zeros(num_experts, 8)
    logits, flags = routing.logits.cpu(), None if routing.row_live is None else routing.row_live.cpu().view(-1)
    for row in range(rows):
        part = slice(row, row + 1)
        live = None if flags is None else flags[part]
        reference.router(
            *nothing, logits[row], live, expert_ids=ids[part], expert_weights=shares[part],
            over_all=routing.over_all, shared=routing.shared,
        )  # fmt: skip
    return ids, shares


def awaited(*shape: int, dtype: torch.dtype, device: str | torch.device = "cpu") -> torch.Tensor:
    """Memory in which nothing is there yet."""
    memory = torch.empty(shape, dtype=dtype, device=device)
    memory.view(torch.uint8).fill_(0xFF)
    return memory


def exact_shares(logits: torch.Tensor, ids: torch.Tensor, *, shared: bool = False) -> torch.Tensor:
    """The shares [M, k] of chosen experts, every step rounded as `route_top_k` promises; 0 where dead."""
    found = torch.zeros(ids.shape)
    for row in (ids[:, 0] >= 0).nonzero()[:, 0].tolist():
        values = logits[row, ids[row].long()].numpy()
        with np.errstate(all="ignore"):
            if shared:
                gate, values = values[-1], values[:-1]
                own = np.float32(1) + np.exp2((np.float32(0) - gate) * np.float32(math.log2(math.e)))
                found[row, -1] = float(np.float32(1) / own)
            powers = np.exp2((values - values[0]) * np.float32(math.log2(math.e)))
            total = np.float32(0)
            for power in powers:
                total = total + power
            found[row, : len(values)] = torch.from_numpy(powers / total)
    return found
