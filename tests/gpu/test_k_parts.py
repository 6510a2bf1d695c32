"""Products whose K is summed in parts: on a GPU the bits of parts summed alone and added as a tree, by any plan."""

import itertools
from typing import Any

import pytest
import torch
from all_reduce_cases import tree_sum
from quantised_layers import random_parts

from lowlat.executors.launcher import Launcher
from lowlat.kernels.formats import MATRIX_FORMATS
from lowlat.kernels.formats.dense import pack_matrix
from lowlat.kernels.gemm.decode.gemm import decode_gemm
from lowlat.kernels.gemm.decode.plan import candidate_plans
from lowlat.kernels.gemm.k_parts import KParts
from lowlat.kernels.gemm.packing import PackedMatrix, pack
from lowlat.kernels.gemm.prefill.activation_layout import arranged_shape
from lowlat.kernels.gemm.prefill.gemm import prefill_gemm
from lowlat.kernels.gemm.prefill.plan import has_prefill_gemm, partials_shape, plans_of
from lowlat.kernels.reference.collectives.cuts import bounds

PARTS_OF_TWO_SIZES = (2880, 2880)
SHAPES = ((4096, 14336), PARTS_OF_TWO_SIZES, (320, 320))  # parts of one size, of two, and some without columns
# every plan is a compilation of its own, and of these each span has several
CASES = [*(("bf16", *shape) for shape in SHAPES), ("fp8", *PARTS_OF_TWO_SIZES), ("nvfp4", *PARTS_OF_TWO_SIZES)]


class Weight:
    """A random weight with a bias, and its columns."""

    def __init__(self, name: str, width: int, depth: int) -> None:
        self.width, self.depth = width, depth
        self.name, self.bias = name, torch.randn(width, device="cuda").bfloat16()
        if name == "bf16":
            self.parts = {"weight": (torch.randn(width, depth, device="cuda") * depth**-0.5).bfloat16()}
        else:
            self.parts = random_parts(name, width, depth, wide=True, device="cuda")

    def of(self, start: int, stop: int) -> PackedMatrix:
        """Some columns, packed."""
        if self.name == "bf16":
            return pack(self.parts["weight"][:, start:stop].contiguous())
        own = {}
        for name, each in self.parts.items():
            spread = self.depth // each.shape[1] if each.dim() > 1 and each.shape[1] > 1 else 0
            own[name] = each[:, start // spread : -(-stop // spread)].contiguous() if spread else each
        return pack_matrix(MATRIX_FORMATS[self.name], own)


def spans(depth: int, size: int) -> list[tuple[int, int]]:
    """The columns of each of so many ranks."""
    return list(itertools.pairwise(64 * end for end in bounds(depth // 64, size, 1)))


@pytest.mark.parametrize(("name", "width", "depth"), CASES)
def test_few_rows(launcher: Launcher, name: str, width: int, depth: int) -> None:
    weight, gpu = Weight(name, width, depth), launcher.gpu
    for rows in (1, 17, 70):
        x = torch.randn(rows, depth, device="cuda").bfloat16()

        def multiply(start: int, stop: int, count: int, x: torch.Tensor = x, rows: int = rows) -> torch.Tensor:
            out = torch.full((rows, width), torch.nan, device="cuda")
            if start == stop:
                return out.zero_()
            parts, own = KParts(count, 1), weight.of(start, stop)
            given: dict[str, Any] = {
                "x": x[:, start:stop].contiguous(),
                "weight": own,
                "bias": None if start else weight.bias,
            }
            launcher.run(*decode_gemm(**given, out=out, parts=parts, gpu=gpu))
            for plan in (
                candidate_plans(rows, width, gpu, weights=own.tile_format, parts=parts)[1:2] if rows < 65 else ()
            ):
                again = torch.full_like(out, torch.nan)
                launcher.run(*decode_gemm(**given, out=again, parts=parts, gpu=gpu, plan=plan))
                assert torch.equal(again, out)
            return out

        whole = tree_sum([multiply(*span, 1) for span in spans(depth, 8)])
        for size in (1, 2, 4):
            assert torch.equal(tree_sum([multiply(*span, 8 // size) for span in spans(depth, size)]), whole)


@pytest.mark.parametrize(("name", "width", "depth"), CASES)
def test_many_rows(launcher: Launcher, name: str, width: int, depth: int) -> None:
    weight, gpu = Weight(name, width, depth), launcher.gpu
    if not has_prefill_gemm(gpu):
        pytest.skip("prefill's GEMMs are for GPUs of capability 9.0")
    for rows in (64, 1024):
        x = torch.randn(rows, depth, device="cuda").bfloat16()

        def multiply(start: int, stop: int, count: int, x: torch.Tensor = x, rows: int = rows) -> torch.Tensor:
            outs: list[torch.Tensor] = []
            if start == stop:
                return torch.zeros(rows, width, device="cuda")
            parts, own, k = KParts(count, 1), weight.of(start, stop), stop - start
            for plan in plans_of(rows, width, k, gpu, own.tile_format, parts)[:2]:
                arranged = torch.full(arranged_shape(rows, k), torch.nan, device="cuda", dtype=torch.bfloat16)
                partials = torch.full(partials_shape(plan, rows, width, k, parts), torch.nan, device="cuda")
                outs.append(torch.full((rows, width), torch.nan, device="cuda"))
                given: dict[str, Any] = {
                    "x": x[:, start:stop].contiguous(),
                    "weight": own,
                    "bias": None if start else weight.bias,
                }
                memory: dict[str, Any] = {"arranged": arranged, "partials": partials, "out": outs[-1]}
                launcher.run(*prefill_gemm(**given, **memory, gpu=gpu, parts=parts, plan=plan))
            assert all(torch.equal(out, outs[0]) for out in outs)
            return outs[0]

        whole = tree_sum([multiply(*span, 1) for span in spans(depth, 8)])
        for size in (1, 2, 4):
            assert torch.equal(tree_sum([multiply(*span, 8 // size) for span in spans(depth, size)]), whole)
