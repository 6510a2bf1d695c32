"""Products whose K is summed in parts, walked thread by thread on a CPU: the bits of parts summed alone and added as a
tree, however many GPUs have them.
"""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from all_reduce_cases import tree_sum
from decode_gemm_walk import SMALL, random, walked
from kernel_walk import Walker
from quantised_layers import random_parts
from stages import wide

from lowlat.errors import ShapeError
from lowlat.kernels.collectives.peers.rows import area_shape
from lowlat.kernels.formats import matrix_format
from lowlat.kernels.formats.dense import pack_matrix
from lowlat.kernels.gemm.decode.gemm import decode_gemm
from lowlat.kernels.gemm.k_parts import KParts
from lowlat.kernels.gemm.packing import PackedMatrix, pack
from lowlat.kernels.reference.collectives.cuts import bounds

pytestmark = pytest.mark.second


def cut_weight(name: str, rows: int, columns: int) -> Any:
    """A function of a slice of columns: a random weight's part, packed; and the numbers of the whole."""
    if name == "bf16":
        weight = random(rows, columns, scale=columns**-0.5)
        return (lambda span: pack(weight[:, span].contiguous())), weight
    parts = random_parts(name, rows, columns, wide=True)
    own_format = matrix_format(parts)
    spread = {part: columns // each.shape[1] for part, each in parts.items() if each.dim() > 1 and each.shape[1] > 1}

    def cut(span: slice) -> PackedMatrix:
        own = {
            part: each[:, span.start // spread[part] : -(-span.stop // spread[part])].contiguous()
            if part in spread else each for part, each in parts.items()
        }  # fmt: skip
        return pack_matrix(own_format, own)

    return cut, own_format.dequantise(parts, torch.float32)


@pytest.mark.parametrize(
    ("name", "rows", "width", "steps", "unit", "changes"),
    [
        ("bf16", 1, 32, 8, 1, {}),
        wide("bf16", 3, 65, 11, 1, {"weight_tiles": 2, "stages": 2}),
        wide("bf16", 9, 32, 5, 1, {"stages": 1}),  # some parts have no columns
        wide("bf16", 2, 40, 22, 2, {"areas": 1, "num_blocks": 1}),
        wide("fp8_block", 1, 32, 16, 2, {"weight_tiles": 1}),
        wide("int4_128", 3, 32, 16, 2, {}),
        wide("nvfp4", 1, 48, 9, 1, {"stages": 1}),
    ],
)
def test_any_number_of_ranks_has_the_tree_of_eight_parts(
    name: str, rows: int, width: int, steps: int, unit: int, changes: dict[str, int]
) -> None:
    """Each rank's GEMM of its columns has the bits of its part of the tree over eight parts that are summed alone.

    The first part has the bias. Tiles are multiplied side by side where a rank has fewer parts than warps.
    """
    x, bias, columns = random(rows, 64 * steps), random(width), 64 * steps
    cut, weight = cut_weight(name, width, columns)

    def multiply(span: slice, count: int, sets: int, has_bias: bool) -> torch.Tensor:
        out = torch.full((rows, width), torch.nan)
        parts = KParts(count, unit)
        given = {"x": x[:, span].contiguous(), "weight": cut(span), "out": out, "bias": bias if has_bias else None}
        with walked(walker := Walker(late=sets % 2 == 0)) as modules:
            thin: Any = modules[-1]
            plan = thin.plan_decode_gemm(rows, width, SMALL, weights=given["weight"].tile_format, parts=parts)
            plan = dataclasses.replace(plan, sets=sets, **changes)
            walker.run(*thin.decode_gemm(**given, parts=parts, gpu=SMALL, plan=plan))
        return out

    ends = [64 * end for end in bounds(steps, 8, unit)]
    alone = [
        multiply(slice(start, stop), 1, 1, not number) if stop > start else torch.zeros(rows, width)
        for number, (start, stop) in enumerate(itertools.pairwise(ends))
    ]
    whole = tree_sum(alone)
    expected = x.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(whole.double(), expected, rtol=2e-3, atol=2e-3)
    for size, sets in ((1, 1), (2, 1), (8, 8)) if name == "bf16" else ((1, 1), (4, 4)):
        own, count = [64 * end for end in bounds(steps, size, unit)], 8 // size
        ranks = [
            multiply(slice(start, stop), count, sets, not number) if stop > start else torch.zeros(rows, width)
            for number, (start, stop) in enumerate(itertools.pairwise(own))
        ]
        assert torch.equal(tree_sum(ranks), whole), size


@pytest.mark.parametrize("ranks", [4])
def test_ranks_add_up_parts_as_they_multiply(ranks: int) -> None:
    """The residual stream of every rank is that of one GPU, which has all parts."""
    rows, width, steps = 2, 72, 12
    x, weight, bias = random(rows, 64 * steps), random(width, 64 * steps), random(width)
    residual, one = random(rows, width), torch.empty(rows, width).bfloat16()
    areas = tuple(torch.zeros(area_shape(ranks, rows, width), dtype=torch.int64) for _ in range(ranks))
    abort, ends = torch.zeros(1, dtype=torch.int64), [64 * end for end in bounds(steps, ranks, 1)]
    with walked(walker := Walker()) as modules:
        thin: Any = modules[-1]
        given: dict[str, Any] = {"residual": residual, "gpu": SMALL}
        walker.run(*thin.decode_gemm(x=x, weight=pack(weight), bias=bias, out=one, parts=KParts(8, 1), **given))
        outs, streams = [torch.empty_like(one) for _ in range(ranks)], []
        for rank, (start, stop) in enumerate(itertools.pairwise(ends)):
            own = {"x": x[:, start:stop].contiguous(), "weight": pack(weight[:, start:stop].contiguous())}
            own |= {"peers": thin.PeerRows(rank, areas, abort), "bias": None if rank else bias, "out": outs[rank]}
            streams.append(thin.decode_gemm(**own, parts=KParts(8 // ranks, 1), **given))
        walker.run(*streams[0], beside=streams[1:])
    assert all(torch.equal(out, one) for out in outs)


def test_what_is_not_summed_in_parts_is_refused() -> None:
    good = {"x": random(1, 512), "weight": pack(random(48, 512)), "out": torch.empty(1, 48), "gpu": SMALL}
    with pytest.raises(ShapeError, match="1, 2, 4 or 8 parts"):
        decode_gemm(**good, parts=KParts(16, 1))  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="not with silu"):
        decode_gemm(**{**good, "out": random(1, 24)}, activation="silu", parts=KParts(8, 1))  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="whole steps of 64 columns, not units of 32 of 512"):
        KParts.of(8, 32, 512)
