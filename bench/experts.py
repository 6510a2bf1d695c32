"""Times of a mixture of experts inside a graph, for several ways to cut its products, with experts read from memory.

    python -m bench.experts --out /tmp/experts.json
    python -m bench.experts --stages 1 2 3 4 --warps 9 15

gpt-oss-120b's sizes. Every copy in the graph reads other experts. The mixture is timed as a step has it: behind a
router, which fills the memory in which its blocks await each other.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench.clock import own_stream
from bench.micro import Entry, time_entries, write_rows
from bench.wall import measure_wall
from lowlat.errors import ShapeError
from lowlat.executors.launcher import Launcher
from lowlat.kernels.formats import BF16, MXFP4, WeightFormat
from lowlat.kernels.formats.mxfp4 import SCALE_OFFSET
from lowlat.kernels.moe.decode.mlp import experts_mlp
from lowlat.kernels.moe.decode.mlp_plan import MlpPlan, plan_mlp
from lowlat.kernels.moe.packing import PackedExperts, allocate_experts
from lowlat.kernels.moe.plan import DOWN, GATE_UP, ExpertShape
from lowlat.kernels.moe.router import RouterNorm, router_logits
from lowlat.kernels.moe.topk_routing import TopKRouting
from lowlat.kernels.toolchain.kernel import KernelCall

__all__ = ["entries", "main"]

HIDDEN, TOP_K, COPIES = 2880, 4, 24
CASES = ((1, 4), (4, 4), (4, 16), (16, 4), (16, 40), (64, 110))  # rows, distinct experts


def _experts(rows: int, num_experts: int, weight_format: WeightFormat, device: torch.device) -> PackedExperts:
    """Experts of random codes or numbers; the order of their rows does not matter here."""
    packed = allocate_experts(weight_format, num_experts=num_experts, rows=rows, columns=HIDDEN, device=device)
    if packed.scales is None:
        packed.words.normal_()
    else:
        packed.words.random_(-(2**31), 2**31 - 1)
        packed.scales.random_(112 + SCALE_OFFSET, 122 + SCALE_OFFSET)
    return packed


def _ids(rows: int, distinct: int, num_experts: int, copy: int, device: torch.device) -> torch.Tensor:
    """Expert ids [M, k] of so many distinct experts, other ones in the next copy."""
    chosen = (torch.arange(distinct) + copy * distinct) % num_experts
    order = torch.cat([torch.randperm(distinct) for _ in range(-(-rows * TOP_K // distinct) + 1)])[: rows * TOP_K]
    if distinct < 2 * TOP_K:  # no expert twice in a row
        order = torch.cat([torch.randperm(distinct)[:TOP_K] for _ in range(rows)])
    return chosen[order].view(rows, TOP_K).int().to(device)


def entries(launcher: Launcher, num_experts: int, quantised: bool, cuts: Sequence[dict[str, int]]) -> list[Entry]:
    """One entry a case and a cut."""
    device = launcher.device
    weight_format = MXFP4 if quantised else BF16
    up, down = (_experts(rows, num_experts, weight_format, device) for rows in (2 * HIDDEN, HIDDEN))
    biases = tuple(torch.randn(num_experts, rows, device=device).bfloat16() for rows in (2 * HIDDEN, HIDDEN))
    first = ExpertShape(GATE_UP, 2 * HIDDEN, HIDDEN, TOP_K, weight_format)
    second = ExpertShape(DOWN, HIDDEN, HIDDEN, TOP_K, weight_format)
    made = []
    for (rows, distinct), cut in itertools.product(CASES, cuts):
        if distinct > num_experts:
            continue
        label = f"router and mixture: {rows} rows, {distinct} experts" + "".join(
            f", {name} {value}" for name, value in cut.items()
        )
        try:
            plan = plan_mlp(rows, first, second, launcher.card, **cut)
        except ShapeError as error:
            print(f"{label}: {error}")
            continue
        x = torch.randn(rows, HIDDEN, device=device).bfloat16()
        ids = [_ids(rows, distinct, num_experts, copy, device) for copy in range(COPIES)]
        moved = min(distinct, rows * TOP_K) * (up.num_bytes + down.num_bytes) // num_experts
        made.append(Entry(label, _calls(launcher, x, ids, (up, down), biases, plan), COPIES, moved))
    return made


def _calls(
    launcher: Launcher, x: torch.Tensor, ids: list[torch.Tensor], experts: tuple[PackedExperts, PackedExperts],
    biases: tuple[torch.Tensor, ...], plan: MlpPlan,
) -> Callable[[int], list[KernelCall]]:  # fmt: skip
    """A router of its own logits, and the mixture of the experts with these ids."""
    rows, num_experts = x.shape[0], experts[0].num_experts
    weight, offset = x.new_empty(num_experts, HIDDEN).normal_(), x.new_zeros(num_experts)
    norm_weight, normed, ignored = torch.ones_like(x[0]), torch.empty_like(x), x.new_empty(rows, num_experts).float()
    activated, partials = x.new_empty(rows, TOP_K, HIDDEN), x.new_empty(rows, TOP_K, HIDDEN).float()
    found, shares, total = torch.empty_like(ids[0]), ids[0].new_empty(rows, TOP_K).float(), torch.empty_like(x)
    logits = [torch.zeros_like(ignored).scatter_(1, each.long(), 9.0) for each in ids]

    def calls(copy: int) -> list[KernelCall]:
        norm = RouterNorm(norm_weight, 1e-5, normed)
        awaited = activated, partials
        filling = router_logits(x, weight, offset, norm=norm, logits=ignored, card=launcher.card, awaited=awaited)
        return filling + experts_mlp(
            x=normed, routing=TopKRouting(logits[copy]), gate_up=experts[0], gate_up_bias=biases[0], down=experts[1],
            down_bias=biases[1], expert_ids=found, expert_weights=shares, activated=activated, partials=partials,
            residual=x, total=total, limit=7.0, alpha=1.702, card=launcher.card, plan=plan,
        )  # fmt: skip

    return calls


def main(arguments: Sequence[str] | None = None) -> None:
    """Time every cut that is asked for, print a row each, and write them where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warps", type=int, nargs="*", default=[], help="that multiply: 9 or 15; changes bits")
    parser.add_argument("--stages", type=int, nargs="*", default=[], help="of a warp's pipeline")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--bf16", action="store_true", help="plain weights; take fewer experts")
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--only", default="", help="a part of the name")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    ways = {"warps": options.warps, "stages": options.stages}
    given = {name: values for name, values in ways.items() if values}
    cuts = [dict(zip(given, values, strict=True)) for values in itertools.product(*given.values())]
    device = torch.device(options.device)
    with own_stream(device):
        launcher = Launcher(device)
        made = entries(launcher, options.experts, not options.bf16, cuts)
        torch.cuda.synchronize(device)
        wall = measure_wall(device).gb_per_s
        chosen = [entry for entry in made if options.only in entry.name]
        launcher.compile_ahead(call for entry in chosen for call in entry.calls(0))
        rows = time_entries(launcher, chosen, options.replays, wall)
    write_rows(rows, options.out, device, wall)


if __name__ == "__main__":
    main()
