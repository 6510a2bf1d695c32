"""Plain numbers: bf16 where kernels read them, the compute dtype elsewhere."""

from types import MappingProxyType
from typing import Any

import torch

from lowlat.kernels.formats.base import Parts, Specs, WeightFormat, check_part
from lowlat.kernels.gemm.packing import PackedMatrix, pack, unpack_rows

__all__ = ["BF16"]


class _Bf16(WeightFormat):
    """One tensor [..., N, K]; a tile's words are its 1024 numbers."""

    name = "bf16"
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
        from lowlat.kernels.formats import bf16_fragment  # needs Numba, which packing does not

        return bf16_fragment.as_multiplied, bf16_fragment.multiply_step

    def prefill_fragment(self, multiply: Any) -> Any:
        """See `WeightFormat.prefill_fragment`."""
        from lowlat.kernels.formats import bf16_fragment

        return bf16_fragment.make_multiply_tiles(multiply)

    def prefill_halves(self) -> tuple[Any, Any, Any]:
        """See `WeightFormat.prefill_halves`."""
        from lowlat.kernels.formats import bf16_fragment

        return bf16_fragment.hold_step, bf16_fragment.first_half, bf16_fragment.second_half


BF16 = _Bf16()
