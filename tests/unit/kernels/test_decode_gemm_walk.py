"""The thin products' kernel itself, walked thread by thread on a CPU: what it computes, copies, waits for and leaves.

Small sizes; the walker checks every address, and copies arrive both as late and as early as they can.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_gemm_walk import SMALL, product, random, run, walked
from kernel_inventory import B200, GPUS
from kernel_walk import Walker
from quantised_layers import random_parts
from rowwise_cases import canonical_norm, check, flags, weights
from selection_cases import best_of
from stages import later, wide

from lowlat.errors import ShapeError
from lowlat.kernels.formats import FP8, MATRIX_FORMATS
from lowlat.kernels.formats.dense import pack_matrix
from lowlat.kernels.gemm.decode.gemm import (
    NormPrologue,
    decode_gemm,
    plan_decode_gemm,
    steps_to_hold,
)
from lowlat.kernels.gemm.decode.plan import DecodeGemmShape, candidate_plans
from lowlat.kernels.gemm.decode.shared_rows_plan import shared_plans
from lowlat.kernels.gemm.packing import PackedMatrix, gate_up_permutation, pack, rope_permutation, runs_of
from lowlat.kernels.gemm.tiles import BF16_TILES, TileFormat
from lowlat.kernels.reference import OPERATIONS
from lowlat.kernels.reference.attention.kv_codes import dequantised_kv
from lowlat.kernels.sampling.select import FINITE, LARGEST_WORD
from lowlat.kernels.toolchain.kernel import H200, Gpu


@pytest.mark.parametrize(
    ("late", "rows", "width", "depth", "changes"),
    [
        (True, 1, 80, 600, {}),
        later(False, 1, 48, 1096, {"stages": 1, "weight_tiles": 1}),
        wide(True, 2, 100, 200, {"stages": 3, "areas": 1}),
        (False, 3, 80, 72, {"weight_tiles": 2, "stages": 2, "num_blocks": 2}),
        (True, 8, 48, 136, {"stages": 2}),
        later(False, 9, 112, 64, {"weight_tiles": 4, "stages": 2, "areas": 1, "num_blocks": 1}),
        later(True, 19, 33, 128, {"stages": 1}),
    ],
)
def test_a_product_is_torch_s(late: bool, rows: int, width: int, depth: int, changes: dict[str, int]) -> None:
    """Tiles that end inside of a width and steps that end inside of a depth; more blocks' turns than one, pipelines
    that hold less than a tile and more."""
    x, weight, bias = random(rows, depth), random(width, depth, scale=depth**-0.5), random(width)
    out = torch.full((rows, width), torch.nan)
    walker = Walker(late)
    with walked(walker) as modules:
        run(walker, modules, changes, x=x, weight=pack(weight), bias=bias, out=out)
    torch.testing.assert_close(out.double(), product(x, weight) + bias.double(), rtol=1e-5, atol=1e-5)


def fp8_weight(width: int, depth: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Every e4m3 code but NaN, rows scaled by powers of two, and the same numbers in bf16, exactly."""
    codes = torch.randint(256, (width, depth), dtype=torch.uint8)
    codes[(codes & 127) == 127] = 0
    parts = {"fp8": codes, "fp8_scales": 2.0 ** torch.randint(-12, -6, (width, 1))}
    return parts, FP8.dequantise(parts, torch.bfloat16)


@pytest.mark.parametrize(
    ("late", "rows", "width", "depth", "changes"),
    [
        later(False, 1, 16, 72, {"stages": 2}),
        wide(False, 9, 112, 64, {"weight_tiles": 4, "stages": 2, "areas": 1, "num_blocks": 1}),
    ],
)
def test_fp8_gives_the_bits_of_the_same_numbers_in_bf16(
    late: bool, rows: int, width: int, depth: int, changes: dict[str, int]
) -> None:
    """In float32, in bf16 with scattered columns, after a norm, with a residual, an activation and best pairs."""
    parts, weight = fp8_weight(width, depth)
    order, live = gate_up_permutation(width // 2), torch.ones(rows, dtype=torch.uint8)
    x, bias, residual = random(rows, depth), random(width), random(rows, width)
    packs = ((pack_matrix(FP8, parts), pack_matrix(FP8, parts, order)), (pack(weight), pack(weight, order)))
    walker, found = Walker(late), []
    with walked(walker) as modules:
        norm = None if rows > 8 else modules[-1].NormPrologue(random(depth), 1e-5, live)
        for plain, gated in packs:
            outs = [torch.full((rows, width), torch.nan, dtype=kind) for kind in (torch.float32, torch.bfloat16) * 2]
            act, pairs = torch.full((rows, width // 2), torch.nan).bfloat16(), torch.zeros(rows, 3, 2).int()
            run(walker, modules, changes, x=x, weight=plain, bias=bias, out=outs[0])
            run(walker, modules, changes, x=x, weight=gated, out=outs[1], columns=runs_of(order))
            best = modules[-1].PartialArgmax(pairs, FINITE)
            run(walker, modules, changes, x=x, weight=plain, out=outs[2], best=best, norm=norm)
            run(walker, modules, changes, x=x, weight=plain, residual=residual, out=outs[3])
            run(walker, modules, changes, x=x, weight=gated, bias=bias, activation="silu", row_live=live, out=act)
            found.append((*outs, act, best_of(pairs)[0]))
    assert all(torch.equal(fp8, bf16) and bool(bf16.isfinite().all()) for fp8, bf16 in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("name", "wide", "rows", "depth", "changes"),
    [
        wide("int4_128", False, 2, 256, {"stages": 2}),
        wide("int4_128", True, 1, 1024, {"weight_tiles": 2, "stages": 2, "span": 2}),
        wide("int4_64_zeros", False, 1, 2048, {"weight_tiles": 1, "stages": 1, "span": 4}),
        later(
            "int4_64", True, 1, 1408, {"weight_tiles": 1, "stages": 2, "span": 2}
        ),  # the last pair of some is one step
        wide("fp8_block", False, 2, 1216, {"weight_tiles": 2, "stages": 1, "span": 4}),  # or three of four lack
        ("int4_32_zeros", True, 3, 96, {"weight_tiles": 1, "areas": 1}),
        wide("int4_32_zeros", True, 1, 1024, {"weight_tiles": 1, "stages": 2, "span": 2}),
        wide("fp8_block", True, 9, 200, {"weight_tiles": 2, "num_blocks": 1}),
        wide("nvfp4", True, 2, 112, {"weight_tiles": 2, "stages": 2}),
        wide("nvfp4", True, 1, 2048, {"weight_tiles": 1, "stages": 2, "span": 4}),
        # some warps have four steps at once and then one, and other ones none after four
        later("int4_128", False, 1, 2304, {"weight_tiles": 1, "stages": 2, "span": 4}),
        wide("nvfp4", False, 4, 2320, {"weight_tiles": 1, "stages": 1, "span": 4}),
    ],
)
def test_groups_have_scales_of_their_own(name: str, wide: bool, rows: int, depth: int, changes: dict[str, int]) -> None:
    """Also after a norm, and the same bits at any number of rows."""
    parts = random_parts(name, 24, depth, wide=wide)
    weight = MATRIX_FORMATS[name].dequantise(parts, torch.float32).double()
    packed, bias = pack_matrix(MATRIX_FORMATS[name], parts), random(24)
    x, walker = random(rows, depth), Walker()
    outs = [torch.full((count, 24), torch.nan) for count in (rows, 1, 1)]
    with walked(walker) as modules:
        run(walker, modules, changes, x=x, weight=packed, bias=bias, out=outs[0])
        run(walker, modules, {}, x=x[-1:], weight=packed, bias=bias, out=outs[1])
        norm = modules[-1].NormPrologue(random(depth), 1e-5)
        run(walker, modules, {}, x=x[-1:], weight=packed, out=outs[2], norm=norm)
    want = x.double() @ weight.t() + bias.double()
    torch.testing.assert_close(outs[0].double(), want, rtol=1e-5, atol=1e-5 * float(weight.abs().sum(1).max()))
    assert torch.equal(outs[0][-1:], outs[1])
    normed = canonical_norm(x[-1:], norm.weight, norm.eps).bfloat16()
    limit = 1e-5 * float(weight.abs().sum(1).max())
    torch.testing.assert_close(outs[2].double(), normed.double() @ weight.t(), rtol=1e-5, atol=limit)


@pytest.mark.parametrize("kind", ["bf16", wide("fp8")])
def test_every_byte_of_the_weights_is_read_once(kind: str) -> None:
    x = random(1, 320)
    walker = Walker()
    packed = pack(random(112, 320)) if kind == "bf16" else pack_matrix(FP8, fp8_weight(112, 320)[0])
    with walked(walker) as modules:
        run(walker, modules, {"weight_tiles": 1}, x=x, weight=packed, out=torch.empty(1, 112))
    assert walker.bytes_copied == packed.tiles.nbytes + 7 * x.numel() * 2  # and the row once for each tile


@pytest.mark.parametrize("rows", [wide(1), 5, wide(12)])
def test_residuals_and_activations(rows: int) -> None:
    weight, residual = random(64, 96, scale=0.1), random(rows, 64)
    x, live = random(rows, 96), torch.ones(rows, dtype=torch.uint8)
    live[rows // 2] = 0
    walker, out = Walker(), torch.full((rows, 64), torch.nan).bfloat16()
    act = torch.full((rows, 32), torch.nan).bfloat16()
    with walked(walker) as modules:
        run(walker, modules, {}, x=x, weight=pack(weight), residual=residual, out=out)
        gated = pack(weight, gate_up_permutation(32))
        run(walker, modules, {}, x=x, weight=gated, activation="silu", row_live=live, out=act)
    wanted = product(x, weight)
    torch.testing.assert_close(out.double(), residual.double() + wanted, rtol=2**-7, atol=1e-3)
    want = torch.nn.functional.silu(wanted[:, :32]) * wanted[:, 32:]
    want[live == 0] = 0
    torch.testing.assert_close(act.double(), want, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("rows", [wide(1), 3])
def test_gates_may_have_another_activation_and_logits_a_cap(rows: int) -> None:
    """As `silu_mul` and `linear` have them, also where values are far from zero; best pairs are of what is capped."""
    x, weight, bias = random(rows, 96), random(48, 96, scale=0.4), random(48)
    out, act = torch.full((rows, 48), torch.nan), torch.full((rows, 24), torch.nan).bfloat16()
    pairs, walker = torch.zeros(rows, 3, 2).int(), Walker()
    with walked(walker) as modules:
        best = modules[-1].PartialArgmax(pairs, FINITE)
        run(walker, modules, {}, x=x, weight=pack(weight), bias=bias, out=out, softcap=2.5, best=best)
        gated = pack(weight, gate_up_permutation(24))
        run(walker, modules, {}, x=x, weight=gated, activation="gelu_tanh", out=act)
    wanted = product(x, weight)
    torch.testing.assert_close(out.double(), 2.5 * ((wanted + bias.double()) / 2.5).tanh(), rtol=1e-6, atol=2e-6)
    assert torch.equal(LARGEST_WORD - best_of(pairs)[1], out.argmax(1))
    want = torch.empty_like(act)
    OPERATIONS["silu_mul"](wanted.float(), out=want, activation="gelu_tanh")
    check("gelu", {"out": act}, {"out": want})


@pytest.mark.parametrize("rows", [wide(1), 5])
def test_a_product_is_the_gate_of_a_layer_s_inputs(rows: int) -> None:
    """Which lie among those of all layers; as `per_layer_gate` has it."""
    weight, inputs, x = random(24, 96, scale=0.3), random(rows, 3 * 24), random(rows, 96)
    live = torch.ones(rows, dtype=torch.uint8)
    live[rows // 2] = rows == 1
    walker, out, gate = Walker(), torch.full((rows, 24), torch.nan).bfloat16(), torch.full((rows, 24), torch.nan)
    with walked(walker) as modules:
        own = {"gated": inputs[:, 24:48], "gated_by": modules[-1].GELU_GATE}
        run(walker, modules, {}, x=x, weight=pack(weight), **own, row_live=live, out=out)
        run(walker, modules, {}, x=x, weight=pack(weight), out=gate)
    want = torch.empty_like(out)
    OPERATIONS["per_layer_gate"](gate, inputs, live, out=want, layer=1)
    check("gate", {"out": out}, {"out": want})
    with pytest.raises(ShapeError, match="rows that are gated lie side by side"):
        decode_gemm(x=x, weight=pack(weight), gated=inputs[:, 0:48:2], out=out)


def test_a_softcap_and_other_activations_are_of_their_own_epilogues() -> None:
    x, weight = random(1, 64), random(32, 64)
    with pytest.raises(ShapeError, match="'relu' is not one of silu, gelu_tanh"):
        decode_gemm(x=x, weight=pack(weight), activation="relu", out=random(1, 16))
    with pytest.raises(ShapeError, match="a softcap is of float32 rows"):
        decode_gemm(x=x, weight=pack(weight), softcap=2.0, out=random(1, 32))


@pytest.mark.parametrize(("rows", "has_bias"), [(1, False), (5, True), wide(12, False)])
def test_a_product_is_the_gate_of_rows(rows: int, has_bias: bool) -> None:
    """As `output_gate` has it: gates and their sigmoids are rounded before the product; dead rows are zero."""
    weight, values, bias = random(40, 96, scale=0.1), random(rows, 40), random(40) if has_bias else None
    x, live = random(rows, 96), torch.ones(rows, dtype=torch.uint8)
    live[rows // 2] = rows == 1
    walker, out, gate = Walker(), torch.full((rows, 40), torch.nan).bfloat16(), torch.full((rows, 40), torch.nan)
    with walked(walker) as modules:
        run(walker, modules, {}, x=x, weight=pack(weight), bias=bias, gated=values, row_live=live, out=out)
        run(walker, modules, {}, x=x, weight=pack(weight), bias=bias, out=gate)
    want = torch.empty_like(out)
    OPERATIONS["output_gate"](values, gate, live, out=want)
    check("gate", {"out": out}, {"out": want})


def test_a_gate_stands_alone() -> None:
    given: Any = {"x": random(2, 64), "weight": pack(random(48, 64)), "gated": random(2, 48)}
    others: Any = ({"residual": random(2, 48)}, {"activation": "silu"})
    for more in others:
        out = torch.empty(2, 24 if "activation" in more else 48).bfloat16()
        with pytest.raises(ShapeError, match="a gate has no residual"):
            decode_gemm(**given, **more, out=out)


@pytest.mark.parametrize(("kind", "rows"), [("bf16", 1), wide("bf16", 4), wide("fp8", 3), wide("codes", 1)])
def test_queries_and_keys_are_rotated_and_the_cache_is_written(kind: str, rows: int) -> None:
    """Two slots of the other order, a dead row; what nobody writes stays."""
    queries, groups, dim, depth, block, batch = 4, 2, 32, 64, 16, 2
    heads = queries + 2 * groups
    weight, bias = random(heads * dim, depth, scale=0.1), random(heads * dim)
    parts_of, weight = fp8_weight(heads * dim, depth) if kind == "fp8" else ({}, weight)
    order = rope_permutation(queries + groups, groups, dim)
    count = batch * rows
    x, live = random(count, depth), torch.ones(count, dtype=torch.uint8)
    live[-1] = 0
    angles = torch.rand(64, dim // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    table = torch.tensor([[3, 1], [2, 5]], dtype=torch.int32)
    slots, lens = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([14, 3], dtype=torch.int32)
    offsets = torch.arange(rows, dtype=torch.int32)
    positions = (lens[:, None] + offsets).reshape(-1).contiguous()
    walker = Walker()
    caches = [torch.zeros(6, groups, block, dim).bfloat16() for _ in range(2)]
    scales = torch.tensor([[0.03125, 0.5], [1.0, 0.25]])
    if kind == "codes":
        caches = [cache.to(torch.uint8) for cache in caches]
    got = torch.full((count, queries, dim), torch.nan).bfloat16()
    with walked(walker) as modules:
        rotation = modules[-1].Rotation(
            positions=positions, cos=cos, sin=sin, row_live=live, k_cache=caches[0], v_cache=caches[1],
            block_table=table, slots=slots, write_lens=lens, offsets=offsets,
            kv_scales=scales if kind == "codes" else None,
        )  # fmt: skip
        packed, ordered = (
            pack_matrix(FP8, parts_of, order) if parts_of else pack(weight, order),
            bias[order].contiguous(),
        )
        run(walker, modules, {}, x=x, weight=packed, bias=ordered, rotation=rotation, head_dim=dim, out=got)
    qkv = (product(x, weight) + bias.double()).float().view(count, heads, dim)
    parts = {name: torch.empty(count, number, dim).bfloat16() for name, number in (("q", queries), ("k", groups))}
    for name, start in (("q", 0), ("k", queries)):
        source = qkv[:, start : start + parts[name].shape[1]]
        low, high = source.chunk(2, dim=-1)
        c, s = cos[positions.long()][:, None], sin[positions.long()][:, None]
        parts[name] = torch.cat((low * c - high * s, high * c + low * s), dim=-1)
    torch.testing.assert_close(got.float(), parts["q"], rtol=2**-7, atol=2e-3)
    if kind == "codes":
        caches = [
            dequantised_kv(cache.transpose(1, 2).flatten(0, 1).transpose(0, 1), own, torch.float32)
            .transpose(0, 1).unflatten(0, (6, block)).transpose(1, 2)
            for cache, own in zip(caches, scales, strict=True)
        ]  # fmt: skip
    loss = 2**-4 if kind == "codes" else 2**-7
    for cache, want in zip(caches, (parts["k"], qkv[:, queries + groups :]), strict=True):
        expected = torch.zeros(cache.shape)
        for row in range(count):
            if live[row]:
                position = int(positions[row])
                page = int(table[slots[row // rows], position // block])
                expected[page, :, position % block] = want[row]
        torch.testing.assert_close(cache.float(), expected, rtol=loss, atol=2e-3)


@pytest.mark.parametrize(
    ("name", "late", "rows", "width", "depth"),
    [
        ("bf16", True, 36, 40, 584),  # the first two of eight turns have two steps, the others one
        later("bf16", False, 70, 72, 200),  # fewer steps than turns, and a group of tiles that lacks some
        later("int4_64_zeros", True, 40, 40, 320),
        later("bf16", True, 34, 24, 1160),  # stages of two steps, of which the last of most turns has one
        wide("fp8_block", False, 100, 40, 576),
        wide("nvfp4", True, 36, 40, 112),
    ],
)
def test_rows_that_blocks_share_have_the_bits_of_others(
    name: str, late: bool, rows: int, width: int, depth: int
) -> None:
    if name == "bf16":
        packed = pack(random(width, depth, scale=depth**-0.5))
    else:
        packed = pack_matrix(MATRIX_FORMATS[name], random_parts(name, width, depth, wide=False))
    x, bias, walker = random(rows, depth), random(width), Walker(late)
    out, want = (torch.full((count, width), torch.nan) for count in (rows, 3))
    with walked(walker) as modules:
        given = {"weight": packed, "bias": bias, "gpu": SMALL}
        (call,) = modules[-1].decode_gemm(x=x, out=out, shares=True, **given)
        assert ("x2_shared" in call.kernel.name) == (depth > 1024)
        walker.run(call)
        for call in modules[-1].decode_gemm(x=x[-3:], out=want, **given):
            walker.run(call)
    assert torch.equal(out[-3:], want) and bool(out.isfinite().all())


@pytest.mark.second
def test_shared_rows_have_all_epilogues() -> None:
    """Residuals, activations with dead rows, best pairs: the bits of the usual kernel, several groups a block."""
    rows, width, depth = 36, 80, 72
    weight, live = random(width, depth, scale=0.1), torch.ones(rows, dtype=torch.uint8)
    live[::5] = 0
    x, residual, walker = random(rows, depth), random(rows, width), Walker()
    plain, gated, found = pack(weight), pack(weight, gate_up_permutation(width // 2)), []
    with walked(walker) as modules:
        for shares in (True, False):
            added, act = (torch.full((rows, count), torch.nan).bfloat16() for count in (width, width // 2))
            out, pairs = torch.full((rows, width), torch.nan), torch.zeros(rows, 3, 2).int()
            own = {"shares": shares, "gpu": SMALL}
            for call in (
                *modules[-1].decode_gemm(x=x, weight=plain, residual=residual, out=added, **own),
                *modules[-1].decode_gemm(x=x, weight=gated, activation="silu", row_live=live, out=act, **own),
                *modules[-1].decode_gemm(
                    x=x, weight=plain, out=out, best=modules[-1].PartialArgmax(pairs, FINITE), **own
                ),
            ):
                walker.run(call)
            found.append((added, act, out, *best_of(pairs)))
    assert all(torch.equal(*each) for each in zip(*found, strict=True))


@pytest.mark.wide
def test_shared_rows_are_rotated_and_the_cache_is_written() -> None:
    """The bits of the usual kernel, with dead rows and slots of another order."""
    queries, groups, dim, depth, block, batch, rows = 2, 1, 32, 64, 16, 9, 4
    heads, count = queries + 2 * groups, batch * rows
    packed = pack(random(heads * dim, depth, scale=0.1), rope_permutation(queries + groups, groups, dim))
    x, live = random(count, depth), (torch.arange(count) % 5 != 2).to(torch.uint8)
    angles = torch.rand(64, dim // 2) * 6
    table, slots = torch.randperm(2 * batch).int().view(batch, 2), torch.randperm(batch).int()
    lens, offsets = torch.randint(26, (batch,), dtype=torch.int32), torch.arange(rows, dtype=torch.int32)
    walker, found = Walker(), []
    with walked(walker) as modules:
        for shares in (True, False):
            caches = [torch.zeros(2 * batch, groups, block, dim).bfloat16() for _ in range(2)]
            out = torch.full((count, queries, dim), torch.nan).bfloat16()
            rotation = modules[-1].Rotation(
                positions=(lens[:, None] + offsets).reshape(-1).contiguous(), cos=angles.cos(), sin=angles.sin(),
                row_live=live, k_cache=caches[0], v_cache=caches[1], block_table=table, slots=slots, write_lens=lens,
                offsets=offsets,
            )  # fmt: skip
            given = {"x": x, "weight": packed, "rotation": rotation, "head_dim": dim, "out": out}
            for call in modules[-1].decode_gemm(**given, shares=shares, gpu=SMALL):
                walker.run(call)
            found.append((out, *caches))
    assert all(torch.equal(*each) for each in zip(*found, strict=True))
    assert bool(found[0][0].isfinite().all()) and all(bool(cache.any()) for cache in found[0][1:])


@pytest.mark.parametrize("gpu", [*GPUS.values(), B200], ids=str)
def test_shared_rows_fit_every_gpu(gpu: Gpu) -> None:
    """Two stages at least; a block's weight tiles are fewer where there are few groups of them for its SMs."""
    for rows in (33, 64, 65, 128):
        tiles = {}
        for width in (2048, 4096, 28672, 128256):
            plan = shared_plans(rows, DecodeGemmShape(width, 4096, "float32", False, False), gpu)[0]
            assert plan.shared_bytes <= gpu.shared_bytes and plan.stages >= 2 and plan.threads == 256
            tiles[width] = plan.weight_tiles
        assert tiles[2048] <= tiles[4096] <= min(tiles[28672], tiles[128256])


@pytest.mark.parametrize("weights", [BF16_TILES, FP8.tiles(wide=False)], ids=lambda tiles: tiles.name)
def test_no_two_plans_of_a_launch_have_one_name(weights: TileFormat) -> None:
    """Neither of blocks that share rows nor of others: a launcher knows loaded kernels by their names."""
    width, depth, rows = 6144, 4096, 64
    x, out = torch.zeros(rows, depth).bfloat16(), torch.zeros(rows, width)
    weight = PackedMatrix(torch.zeros(1, dtype=torch.uint8), width, depth, tile_format=weights)
    shape = DecodeGemmShape(width, depth, "float32", False, False, weights=weights)
    usual = candidate_plans(rows, width, H200, weights=weights, depth=depth)
    names = [
        call.kernel.name
        for plan in (*usual, *shared_plans(rows, shape, H200))
        for call in decode_gemm(x=x, weight=weight, out=out, plan=plan)
    ]
    assert len(names) == len(set(names)) > 20


def test_a_row_has_the_same_bits_in_any_company() -> None:
    weight, row = pack(random(48, 520)), random(1, 520)
    walker = Walker()
    with walked(walker) as modules:
        alone = torch.empty(1, 48)
        run(walker, modules, {}, x=row, weight=weight, out=alone)
        for rows, changes in ((2, {"stages": 1}), (11, {"areas": 1})):
            x, out = torch.full((rows, 520), torch.nan).bfloat16(), torch.empty(rows, 48)
            place = int(torch.randint(rows, (1,)))
            x[place] = row[0]
            run(walker, modules, changes, x=x, weight=weight, out=out)
            assert torch.equal(out[place], alone[0])


@pytest.mark.parametrize(
    ("late", "rows", "width", "depth", "changes", "dtype"),
    [
        (False, 3, 32, 200, {"stages": 1}, torch.float32),
        later(False, 2, 33, 72, {"weight_tiles": 2, "stages": 2, "num_blocks": 2}, torch.bfloat16),
        (True, 5, 16, 64, {"areas": 1}, torch.bfloat16),
        later(True, 1, 16, 4096 + 72, {}, torch.float32),
    ],
)
def test_rows_are_normed_in_every_block(
    late: bool, rows: int, width: int, depth: int, changes: dict[str, int], dtype: torch.dtype
) -> None:
    """The kernel has the bits of norm and product apart, for norm weights of either dtype; normed rows may be kept."""
    eps, live = 1e-5, flags(rows)
    x, weight, norm_weight = random(rows, depth), pack(random(width, depth)), weights(depth, dtype)
    normed = torch.where(live[:, None] != 0, canonical_norm(x, norm_weight, eps), 0).bfloat16()
    got, again, want = (torch.full((rows, width), torch.nan) for _ in range(3))
    kept = torch.full_like(x, torch.nan)
    walker = Walker(late)
    with walked(walker) as modules:
        norm = modules[-1].NormPrologue(norm_weight, eps, live)
        run(walker, modules, changes, x=x, weight=weight, out=got, norm=norm)
        run(walker, modules, changes, x=x, weight=weight, out=again, norm=replace(norm, out=kept))
        run(walker, modules, {}, x=normed, weight=weight, out=want)
    assert torch.equal(got, want) and torch.equal(again, want) and torch.equal(kept, normed)


@pytest.mark.parametrize("gpu", [*GPUS.values(), B200], ids=str)
def test_held_rows_leave_most_of_a_block_to_weights(gpu: Gpu) -> None:
    for rows in (1, 2, 4, 8):
        for depth in (64, 2880, 4096, 8192, 14336):
            held = steps_to_hold(rows, depth, gpu)
            assert held in (0, -(-depth // 64))
            plan = plan_decode_gemm(rows, 4096, gpu, held)
            assert plan.shared_bytes <= gpu.shared_bytes
            assert not held or (plan.threads == 512 and 3 * held * 128 * plan.columns <= gpu.shared_bytes)
    assert steps_to_hold(8, 4096, H200) == 64 and steps_to_hold(1, 14336, H200) == 224
    assert not steps_to_hold(9, 64, H200) and not steps_to_hold(4, 14336, H200)


def test_norms_that_do_not_fit_are_refused() -> None:
    x, weight, out = random(4, 64), pack(random(16, 64)), torch.empty(4, 16)
    for norm, message in (
        (NormPrologue(random(72), 1e-5), "norm.weight must have shape"),
        (NormPrologue(random(64), 1e-5, flags(3)), "row_live must have 4 entries"),
        (NormPrologue(random(64), 1e-5, out=random(3, 64)), "norm.out must have shape"),
    ):
        with pytest.raises(ShapeError, match=message):
            decode_gemm(x=x, weight=weight, out=out, norm=norm)
    with pytest.raises(ShapeError, match="kept by plain GEMMs"):
        kept = NormPrologue(random(64), 1e-5, out=random(4, 64))
        decode_gemm(x=x, weight=weight, out=out, residual=random(4, 16), norm=kept)
    with pytest.raises(ShapeError, match="holds 9 rows of 64"):
        decode_gemm(x=random(9, 64), weight=weight, out=torch.empty(9, 16), norm=NormPrologue(random(64), 1e-5))


@pytest.mark.parametrize("tiles", [BF16_TILES, FP8.tiles(wide=False)], ids=["bf16", "fp8"])
def test_a_single_turn_leaves_memory_to_its_neighbours(tiles: TileFormat) -> None:
    """Stages that a block never fills keep the next launch's blocks out; plans with as many are candidates still."""
    first, second, *_ = candidate_plans(1, 2048, H200, weights=tiles, depth=4096)
    assert (first.num_blocks, first.stages * first.span) == (128, 8)
    assert first.shared_bytes + 16 * 1024 < H200.shared_bytes < second.shared_bytes + 16 * 1024
