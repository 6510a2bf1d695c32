"""The GEMM of a few rows with a bf16 weight in panels: every sum in float32, in an order that is part of its meaning.

A sum runs over parts of K: fused multiply-adds in order inside a part, starting at zero, and the parts' sums added in
order. So a row's bits depend on the row, the weight and the width of the parts alone. Panels of PANEL_WIDTH columns lie
one after the other as they are read, so the GEMM of a single row runs at the speed of memory; it needs half the
bytes of float32.
"""

import numpy as np

from lowlat.kernels.toolchain.numba_cpu import cpu_function, cpu_kernel, fma, prange

__all__ = ["PANEL_WIDTH", "panel_gemm"]

PANEL_WIDTH = 64
STEPS = 8  # of K between a load and a store of the sums


@cpu_function
def _widen(bits):  # type: ignore[no-untyped-def]
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@cpu_function
def _sum_part(rows, panel, sums):  # type: ignore[no-untyped-def]
    """The sums of two rows [k, 2] over one part of a panel [k, PANEL_WIDTH]: sums [2 * PANEL_WIDTH]."""
    sums[:] = 0
    depth = panel.shape[0]
    whole = depth // STEPS * STEPS
    for start in range(0, whole, STEPS):
        for column in range(PANEL_WIDTH):
            first, second = sums[column], sums[PANEL_WIDTH + column]
            for step in range(STEPS):
                weight = _widen(panel[start + step, column])
                first = fma(rows[start + step, 0], weight, first)
                second = fma(rows[start + step, 1], weight, second)
            sums[column] = first
            sums[PANEL_WIDTH + column] = second
    for step in range(whole, depth):
        for column in range(PANEL_WIDTH):
            weight = _widen(panel[step, column])
            sums[column] = fma(rows[step, 0], weight, sums[column])
            sums[PANEL_WIDTH + column] = fma(rows[step, 1], weight, sums[PANEL_WIDTH + column])


@cpu_kernel
def panel_gemm(pairs, panels, part, out):  # type: ignore[no-untyped-def]
    """out = rows @ weight.T.

    pairs   [ceil(m / 2), K, 2]                       float32  two rows side by side; past m anything
    panels  [ceil(N / PANEL_WIDTH), K, PANEL_WIDTH]  uint16   the weight's bits of bf16, columns past N zero
    part    columns of K that are summed up before the next
    out     [m, N]                                   float32  out
    """
    depth, (num_rows, width) = panels.shape[1], out.shape
    for index in prange(panels.shape[0]):
        sums = np.empty(2 * PANEL_WIDTH, np.float32)
        left = index * PANEL_WIDTH
        count = min(PANEL_WIDTH, width - left)
        for start in range(0, depth, part):
            stop = min(start + part, depth)
            for pair in range(pairs.shape[0]):
                _sum_part(pairs[pair, start:stop], panels[index, start:stop], sums)
                for row in range(2 * pair, min(2 * pair + 2, num_rows)):
                    own = sums[(row - 2 * pair) * PANEL_WIDTH :]
                    for column in range(count):
                        before = np.float32(0) if start == 0 else out[row, left + column]
                        out[row, left + column] = before + own[column]
