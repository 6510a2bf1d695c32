"""This example adds a weight format: INT8 by row, with packing, a decode GEMM, unpacking for prefill, and experts.

The class below and its entries in the tables are all that kernels, plans and the reference need.
"""

from types import MappingProxyType
from typing import Any

import pytest
import torch
from decode_gemm_walk import run, walked
from kernel_walk import Walker, walkable

from lowlat.kernels import formats
from lowlat.kernels.formats.base import DenseFormat, Fragment, Parts, Specs
from lowlat.kernels.formats.dense import pack_matrix, unpack_matrix
from lowlat.kernels.formats.panels import lanes_of, padding_of
from lowlat.kernels.gemm import unpacking
from lowlat.kernels.gemm.decode import gemm as decode_gemm
from lowlat.kernels.gemm.decode.plan import ADD, DecodeGemmShape, plan_decode_gemm
from lowlat.kernels.gemm.packing import TILE_ROWS
from lowlat.kernels.gemm.tiles import TileFormat
from lowlat.kernels.gemm.unpacking import unpacked_shape
from lowlat.kernels.moe.packing import pack_experts, unpack_expert
from lowlat.kernels.toolchain.kernel import H200
from lowlat.kernels.toolchain.numba_cuda import compile_ptx

OFFSET = 128  # a byte stores number + OFFSET


class Int8(DenseFormat):
    """INT8 by row: numbers from -128 to 127 as bytes [..., N, K], and a float32 scale for each row."""

    name = codes = "int8"
    parts = MappingProxyType({"int8": 1, "int8_scales": 0})

    def specs(self, rows: int, columns: int, dtype: torch.dtype) -> Specs:
        return {"int8": ((rows, columns), torch.uint8), "int8_scales": ((rows, 1), torch.float32)}

    def shape(self, parts: Parts) -> tuple[int, ...]:
        return tuple(parts["int8"].shape)

    def dequantise(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        return ((parts["int8"].float() - OFFSET) * parts["int8_scales"]).to(dtype)

    def tiles(self, *, wide: bool) -> TileFormat:
        return TileFormat(self.codes, 1024, row_scales=True)

    def pack_panel(self, parts: Parts, tiles: TileFormat, steps: torch.Tensor, row_scales: torch.Tensor) -> None:
        padding = padding_of(self.shape(parts), steps)
        lanes = lanes_of(torch.nn.functional.pad(parts["int8"], padding, value=OFFSET), steps)
        steps.copy_(lanes.permute(0, 3, 1, 2, 5, 4, 6).reshape(steps.shape))
        row_scales.copy_(parts["int8_scales"].reshape(-1))

    def unpack_panel(self, steps: torch.Tensor, tiles: TileFormat) -> torch.Tensor:
        height, width, _ = steps.shape
        rows = steps.view(height, width, 2, 8, 4, 2, 8).permute(0, 2, 3, 1, 5, 4, 6)
        return (rows.reshape(height * TILE_ROWS, -1).to(torch.int16) - OFFSET).bfloat16()

    def fragment(self, tiles: TileFormat) -> Fragment:
        from lowlat.kernels.toolchain import ptx
        from lowlat.kernels.toolchain.numba_cuda import device_function, float32, uint32

        @device_function
        def number(word: Any, byte: Any) -> Any:
            return ptx.add_rn(float32((word >> uint32(8 * byte)) & uint32(255)), float32(-OFFSET))

        @device_function
        def expand(word: Any) -> Any:
            low = ptx.bf16_pair(number(word, 0), number(word, 1))
            return low, ptx.bf16_pair(number(word, 2), number(word, 3))

        @device_function
        def eight(a: Any, b: Any, c: Any, d: Any) -> Any:
            return expand(a) + expand(b) + expand(c) + expand(d)

        @device_function
        def load_half(codes: Any, half: Any, _words: Any) -> Any:
            top, low = ptx.load_shared_128(codes), ptx.load_shared_128(uint32(codes + uint32(512)))
            if half == 0:
                return eight(top[0], top[1], low[0], low[1])
            return eight(top[2], top[3], low[2], low[3])

        def halves(four: Any, _one: Any) -> tuple[Any, Any, Any]:
            @device_function
            def hold(step: Any, lane: Any) -> Any:
                at = uint32(lane * uint32(16))
                return four(step, at), four(step, uint32(at + uint32(512)))

            @device_function
            def first(held: Any) -> Any:
                return eight(held[0][0], held[0][1], held[1][0], held[1][1])

            @device_function
            def second(held: Any) -> Any:
                return eight(held[0][2], held[0][3], held[1][2], held[1][3])

            return hold, first, second

        return Fragment(halves=halves, load_half=load_half)


INT8 = Int8()


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (formats.DENSE_FORMATS, formats.MATRIX_FORMATS, formats.CODED_FORMATS):
        monkeypatch.setitem(table, INT8.name, INT8)


def matrix(*outer: int, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Draw the parts of a matrix, or of a stack of matrices."""
    codes = torch.randint(0, 256, (*outer, rows, columns), dtype=torch.uint8)
    return {"int8": codes, "int8_scales": torch.rand(*outer, rows, 1) / 64}


def test_a_decode_gemm_multiplies_by_it() -> None:
    parts, x, walker, out = matrix(rows=40, columns=200), torch.randn(3, 200).bfloat16(), Walker(), torch.empty(3, 40)
    with walked(walker) as modules:
        run(walker, modules, {"weight_tiles": 2}, x=x, weight=pack_matrix(INT8, parts), out=out)
    want = x.double() @ INT8.dequantise(parts, torch.float32).double().T
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-4)


def test_prefill_unpacks_it_and_plans_count_it() -> None:
    parts, walker, made = matrix(rows=40, columns=256), Walker(), torch.empty(unpacked_shape(40, 256)).bfloat16()
    packed = pack_matrix(INT8, parts)
    with walkable(walker, "formats.fragment", "gemm.prefill.weight_steps", "gemm.unpacking") as modules:
        walker.run(*modules[-1].unpack_weight(weight=packed, out=made))
    assert packed.scales is not None and torch.equal(made[:40], unpack_matrix(packed))
    assert torch.equal(made[:40].float() * packed.scales[:40, None], INT8.dequantise(parts, torch.float32))
    assert packed.num_bytes == INT8.packed_bytes(40, 256) and formats.matrix_format(parts) is INT8


def test_experts_are_packed_in_it() -> None:
    parts = matrix(3, rows=32, columns=128)
    packed = pack_experts(parts)
    assert packed.format.name == "int8" and packed.row_scales is not None
    for expert in range(3):
        own = {name: part[expert] for name, part in parts.items()}
        assert torch.equal(unpack_expert(packed, expert), INT8.dequantise(own, torch.bfloat16))


@pytest.mark.second
def test_its_kernels_compile() -> None:
    tiles = INT8.tiles(wide=False)
    shape = DecodeGemmShape(4096, 1024, ADD, bias=False, live=False, weights=tiles)
    plan = plan_decode_gemm(1, 4096, H200, weights=tiles, depth=1024)
    for kernel in (decode_gemm._make(shape, plan), unpacking._make(tiles, 64)):
        ptx, _ = compile_ptx(kernel.function, kernel.signature, (9, 0), (kernel.threads, kernel.min_blocks))
        assert "cvt.rn.bf16x2" in ptx or "mma.sync" in ptx
