"""This module lists the implementations of GEMMs over arranged rows, by GPU.

A GPU of another capability gets its own by an `ArrangedGemm` and an entry in ARRANGED_GEMMS. Lowering and its fusions
call `arranged_gemm`. Norms, attention and gated GEMMs store rows in the one order of `activation_layout`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lowlat.kernels.gemm.packing import PackedMatrix
from lowlat.kernels.gemm.prefill.coded_rows import CODED_STEP, is_coded_by_row
from lowlat.kernels.gemm.prefill.gemm import arranged_prefill_gemm, gated_prefill_gemm, gates
from lowlat.kernels.gemm.prefill.plan import APART_ROWS, MOST_ROWS, has_prefill_gemm
from lowlat.kernels.gemm.tiles import BF16_TILES
from lowlat.kernels.toolchain.kernel import Gpu, KernelCall

__all__ = ["ARRANGED_GEMMS", "ArrangedGemm", "arranged_gemm"]


@dataclass(frozen=True)
class ArrangedGemm:
    """One implementation.

    name            for messages
    runs_on         whether a GPU has its instructions
    rows, width     it takes multiples of so many rows, and of so many weight rows and columns
    code_width      and of codes of rows multiples of so many columns
    most_rows       of a launch
    most_in_parts   of a launch that sums K in several parts
    multiply        `arranged_prefill_gemm`, or what takes its arguments
    multiply_gated  `gated_prefill_gemm`, or what takes its arguments
    gates           (weight rows, parts of K): whether `multiply_gated` takes such a weight
    takes_codes     whether both take codes of rows next to a weight, see `CodedRows`
    """

    name: str
    runs_on: Callable[[Gpu], bool]
    rows: int
    width: int
    code_width: int
    most_rows: int
    most_in_parts: int
    multiply: Callable[..., list[KernelCall]]
    multiply_gated: Callable[..., list[KernelCall]]
    gates: Callable[[int, int], bool]
    takes_codes: Callable[[PackedMatrix], bool]

    def covers(self, chunk: int, weight: PackedMatrix) -> bool:
        """Whether it multiplies by a weight, in chunks of so many rows."""
        fits = chunk % self.rows == 0 and weight.rows % self.width == 0 and weight.columns % self.width == 0
        return fits and (weight.tile_format != BF16_TILES or weight.tiles.dtype == torch.bfloat16)

    def at_once(self, parts: int) -> int:
        """The most rows of a launch that sums K in so many parts."""
        return self.most_rows if parts == 1 else self.most_in_parts


WGMMA = ArrangedGemm(
    "wgmma", has_prefill_gemm, 64, 8, CODED_STEP, MOST_ROWS, APART_ROWS, arranged_prefill_gemm, gated_prefill_gemm,
    gates, is_coded_by_row,
)  # fmt: skip
ARRANGED_GEMMS = (WGMMA,)


def arranged_gemm(gpu: Gpu) -> ArrangedGemm | None:
    """The implementation that a GPU has; None: prompts are multiplied by a matrix library there."""
    return next((each for each in ARRANGED_GEMMS if each.runs_on(gpu)), None)
