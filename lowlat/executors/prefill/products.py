"""Products of a chunk of prefill by packed weights, where a card has wide products.

Rows do not know of each other there: so chunks may run together. Weights that wide products do not take are others'.
"""

from collections.abc import Callable

import torch

from lowlat.executors.prefill.kernels import Launches
from lowlat.executors.prefill.room import ProductsRoom
from lowlat.kernels.gemm.packing import PackedMatrix
from lowlat.kernels.gemm.prefill.activation_layout import arranged_shape
from lowlat.kernels.gemm.prefill.gemm import prefill_gemm
from lowlat.kernels.gemm.prefill.plan import MOST_ROWS, has_prefill_gemm, partials_shape, plan_prefill_gemm
from lowlat.kernels.toolchain.kernel import KernelCall

__all__ = ["WideProducts"]

ROWS = 64  # a product has a multiple of so many
WIDTH = 8  # and of so many weight rows and columns


class WideProducts:
    """Makes a chunk's products, of launches that are loaded later.

    room  uint8, at least `size.num_bytes`: one product's rows as it reads them, and sums of its segments
    """

    def __init__(self, launches: Launches, size: ProductsRoom, room: torch.Tensor) -> None:
        self._launches = launches
        self._arranged, self._partials = size.cut(room)

    def takes(self, chunk: int, weight: PackedMatrix) -> bool:
        """Whether a weight's products are made here, in chunks of so many rows."""
        fits = chunk % ROWS == 0 and weight.rows % WIDTH == 0 and weight.columns % WIDTH == 0
        return fits and has_prefill_gemm(self._launches.card) and weight.tiles.dtype == torch.bfloat16

    def product(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        weight: PackedMatrix,
        bias: torch.Tensor | None,
        columns: torch.Tensor | None,
    ) -> Callable[..., None]:
        """out [M, N] float32 = x [M, K] @ weight.T + bias, over these buffers; bias and columns as `prefill_gemm`'s."""
        calls: list[KernelCall] = []
        for rows, results in zip(x.split(MOST_ROWS), out.split(MOST_ROWS), strict=True):
            plan = plan_prefill_gemm(rows.shape[0], weight.rows, weight.columns, self._launches.card)
            shapes = (
                arranged_shape(rows.shape[0], weight.columns),
                partials_shape(plan, rows.shape[0], weight.rows, weight.columns),
            )
            arranged, partials = (
                part[: shape.numel()].view(shape)
                for part, shape in zip((self._arranged, self._partials), map(torch.Size, shapes), strict=True)
            )
            calls += prefill_gemm(
                x=rows, weight=weight, bias=bias, columns=columns, arranged=arranged, partials=partials, out=results,
                card=self._launches.card, plan=plan,
            )  # fmt: skip
        return self._launches.add(calls)
