"""This module lays out the rows of a draft model that reads only tokens, in one launch."""

from functools import cache
from typing import Any

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import byte_at, int_at, set_byte, set_int
from lowlat.kernels.reference.speculation import token_rows as reference
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, int64, types

__all__ = ["examples", "token_rows"]

THREADS = 64  # the most rows of a slot


@launches(reference.token_rows)
def token_rows(given: Given) -> list[KernelCall]:
    """`token_rows` of the reference. Raises ShapeError for rows or a first column that do not fit."""
    (batch, columns, rows), column = given.sizes("B", "N", "R"), given.params["column"]
    if not 1 <= rows <= THREADS or not 0 <= column <= columns - rows:
        raise ShapeError(
            f"token_rows: {rows} rows from column {column} of {columns}, of which 1 to {THREADS} are taken"
        )
    kernel = _make(columns, rows, column, given.params["ahead"], "counts" in given.arrays)
    counts = given.arrays.get("counts", given["lens"])
    arguments = (given["given"], given["live"], given["lens"], counts)
    outputs = given.take("tokens", "positions", "row_live", "write_lens")
    return [KernelCall(kernel, (batch, 1, 1), (*arguments, *outputs))]


@cache
def _make(columns: int, rows: int, column: int, ahead: int, counted: bool) -> Kernel:
    """A block a slot, a thread a row: grid (B,)."""

    def kernel(
        given: Any, live: Any, lens: Any, counts: Any, tokens: Any, positions: Any, row_live: Any, write_lens: Any
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        owner, row = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        going = byte_at(live, owner) != 0
        first = int_at(lens, owner) + ahead if going else int64(0)
        if row == 0:
            set_int(write_lens, owner, first)
        if row < rows:
            place, token = owner * rows + row, int_at(given, owner * columns + column + row)
            alive = going and token >= 0
            if counted:
                alive = alive and row < int_at(counts, owner)
            set_int(tokens, place, token if alive else int64(-1))
            set_int(positions, place, first + row if alive else int64(0))
            set_byte(row_live, place, 1 if alive else 0)

    name = f"token_rows_{columns}_{rows}_{column}_{ahead}{'_counted' if counted else ''}"
    return Kernel(name, kernel, (types.int64,) * 8, THREADS, waits_before_trigger=True)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles."""
    return [_make(8, 8, 0, 1, True), _make(8, 1, 3, 2, False)]
