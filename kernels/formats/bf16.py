"""Plain numbers: bf16 where kernels read them, the compute dtype elsewhere. Packed, they are the words of mma."""

from types import MappingProxyType
from typing import Any

import torch

from lowlat.kernels.formats.base import CodedFormat, Fragment, Parts, Specs, WeightFormat, check_part
from lowlat.kernels.gemm.packing import PackedMatrix, pack, unpack_rows
from lowlat.kernels.gemm.tiles import TileFormat

__all__ = ["BF16", "make_unchanged"]


class _Bf16(WeightFormat, CodedFormat):
    """One tensor [..., N, K]; a tile's words are its 1024 numbers."""

    name = codes = "bf16"
    parts = MappingProxyType({"weight": 1})
    word_dtype = torch.bfloat16
    tile_words = 1024

    def specs(self, rows: int, columns: int, dtype: torch.dtype) -> Specs:
        """See `WeightFormat.specs`."""
        return {"weight": ((rows, columns), dtype)}

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """See `WeightFormat.shape`."""
        return tuple(parts["weight"].shape)

    def dequantise(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """See `WeightFormat.dequantise`."""
        return parts["weight"].to(dtype)

    def pack_into(
        self, parts: Parts, shape: tuple[int, int], order: torch.Tensor | None, words: torch.Tensor,
        scales: torch.Tensor | None, row_scales: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """See `WeightFormat.pack_into`."""
        check_part("weight", parts["weight"], *shape)
        words.copy_(pack(parts["weight"].to(words.device, torch.bfloat16), order).tiles)

    def unpack(
        self, shape: tuple[int, int], words: torch.Tensor, scales: torch.Tensor | None,
        row_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See `WeightFormat.unpack`."""
        return unpack_rows(PackedMatrix(words, *shape))

    def decode_fragment(self) -> tuple[Any, Any]:
        """See `WeightFormat.decode_fragment`; inputs stay as they are."""
        return make_unchanged(), _make_multiply_step()

    def prefill_fragment(self, multiply: Any) -> Any:
        """See `WeightFormat.prefill_fragment`."""
        return _make_multiply_tiles(multiply)

    def prefill_halves(self) -> tuple[Any, Any, Any]:
        """See `WeightFormat.prefill_halves`."""
        return _make_halves()

    def fragment(self, tiles: TileFormat) -> Fragment:
        """See `CodedFormat.fragment`; steps load from shared memory alone: registers hold what memory does."""
        from lowlat.kernels.toolchain import ptx
        from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

        load = ptx.load_shared_tiles(4, PIECE_BYTES)

        @device_function
        def load_step(step: Any, lane: Any) -> Any:
            return load(uint32(step + uint32(lane * uint32(16))))

        return Fragment(halves=lambda _four, _one: _make_halves(), load_half=_make_load_half(), load_step=load_step)


BF16 = _Bf16()
PIECE_BYTES = 512  # a lane's 16 bytes, of all lanes
ROW_BYTES = 2 * PIECE_BYTES  # from a lane's words to those of the row 8 below


def make_unchanged() -> Any:
    """A device function: a lane's inputs of a step, as they are."""
    from lowlat.kernels.toolchain.numba_cuda import device_function

    @device_function
    def unchanged(words: Any) -> Any:
        return words

    return unchanged


def _make_load_half() -> Any:
    """A device function: a lane's numbers of half a step, see `Fragment.load_half`."""
    from lowlat.kernels.toolchain import ptx
    from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

    @device_function
    def load_half(weights: Any, half: Any, _words: Any) -> Any:
        a0, a1, a2, a3 = ptx.load_shared_128(uint32(weights + uint32(half * PIECE_BYTES)))
        b0, b1, b2, b3 = ptx.load_shared_128(uint32(weights + uint32(half * PIECE_BYTES + ROW_BYTES)))
        return a0, a1, a2, a3, b0, b1, b2, b3

    return load_half


def _make_multiply_step() -> Any:
    """A device function: a step of a tile, see `WeightFormat.decode_fragment`."""
    from lowlat.kernels.toolchain import ptx
    from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

    @device_function
    def multiply_step(sums: Any, words: Any, _scales: Any, x: Any) -> Any:
        c0, c1, c2, c3 = sums
        for part in range(2):
            a0, a1, a2, a3 = ptx.load_shared_128(words + uint32(part * PIECE_BYTES))
            b0, b1, b2, b3 = ptx.load_shared_128(words + uint32(part * PIECE_BYTES + ROW_BYTES))
            if part == 0:
                c0, c1, c2, c3 = ptx.mma_bf16(c0, c1, c2, c3, a0, b0, a1, b1, x[0], x[1])
                c0, c1, c2, c3 = ptx.mma_bf16(c0, c1, c2, c3, a2, b2, a3, b3, x[2], x[3])
            else:
                c0, c1, c2, c3 = ptx.mma_bf16(c0, c1, c2, c3, a0, b0, a1, b1, x[4], x[5])
                c0, c1, c2, c3 = ptx.mma_bf16(c0, c1, c2, c3, a2, b2, a3, b3, x[6], x[7])
        return c0, c1, c2, c3

    return multiply_step


def _make_halves() -> tuple[Any, Any, Any]:
    """Device functions: where a lane's words of a step are, and either half of them, which load when asked for."""
    from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

    load_half = _make_load_half()

    @device_function
    def hold_step(step: Any, lane: Any) -> Any:
        return uint32(step + uint32(lane * uint32(16)))

    @device_function
    def first_half(held: Any) -> Any:
        return load_half(held, 0, held)

    @device_function
    def second_half(held: Any) -> Any:
        return load_half(held, 1, held)

    return hold_step, first_half, second_half


def _make_multiply_tiles(multiply: Any) -> Any:
    """A device function: a step of two tiles, see `WeightFormat.prefill_fragment`."""
    from lowlat.kernels.toolchain import ptx
    from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

    tile_bytes = BF16.tile_bytes

    @device_function
    def multiply_numbers(sums: Any, words: Any, _scales: Any, rows: Any, later_rows: Any, live: Any) -> Any:
        a, b = ptx.load_shared_128(words), ptx.load_shared_128(uint32(words + uint32(1024)))
        second = uint32(words + uint32(tile_bytes))
        c, d = ptx.load_shared_128(second), ptx.load_shared_128(uint32(second + uint32(1024)))
        sums = multiply(sums, a, b, c, d, rows, live)
        a, b = ptx.load_shared_128(uint32(words + uint32(512))), ptx.load_shared_128(uint32(words + uint32(1536)))
        c, d = ptx.load_shared_128(uint32(second + uint32(512))), ptx.load_shared_128(uint32(second + uint32(1536)))
        return multiply(sums, a, b, c, d, later_rows, live)

    return multiply_numbers
