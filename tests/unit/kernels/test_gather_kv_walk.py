"""Keys and values gathered for a chunk of prefill, walked thread by thread on a CPU: rows, zeros and lengths."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from gather_cases import POISON, Gather, wanted_rows
from kernel_walk import Walker, walkable

from lowlat.kernels.attention.prefill.gathered_rows import ALIGNMENT, gathered_rows, tiles_shape
from lowlat.kernels.toolchain.kernel import H200

NAMES = ("attention.prefill.gather_kv",)
CASES = [
    Gather(32, 300, 0, 32),
    Gather(32, 300, 0, 0),
    Gather(32, 300, 0, 1),
    Gather(32, 300, 288, 11, heads=1),  # padded past the context's end
    Gather(48, 300, 240, 48, dim=8, block=8),
    Gather(32, 300, 0, 20, window=1),
    Gather(32, 300, 128, 32, window=1),
    Gather(32, 300, 128, 32, window=2),
    Gather(32, 300, 256, 30, window=40),
    Gather(32, 300, 160, 32, window=32),
    Gather(32, 300, 160, 32, window=33),
    Gather(64, 400, 384, 16, window=100, heads=3),
    Gather(64, 400, 320, 64, window=1000),
    Gather(32, 300, 0, 32, first=1),
    Gather(32, 300, 64, 32, window=300, first=1),
    Gather(32, 300, 256, 32, window=40, first=1),
    Gather(32, 300, 192, 30, window=40, coded=True),
]


def walked(case: Gather, **changed: torch.Tensor) -> dict[str, Any]:
    """Run the kernel on 64 threads, so that each takes several turns, and return its output."""
    arrays = {**case.arrays(), **changed}
    with walkable(walker := Walker(), *NAMES) as modules:
        kernels: Any = modules[-1]
        kernels.THREADS, kernels.BLOCKS = 32, 2
        walker.run(*kernels.gather_kv(**arrays, **case.options, gpu=replace(H200, num_multiprocessors=1)))
    return arrays


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_rows_of_the_reference(case: Gather) -> None:
    """The table's entries after the last live row, and the caches' other rows, are rubbish."""
    found, expected = walked(case), case.arrays()
    wanted_rows(**expected, **case.options)
    for name in ("keys", "values", "lengths"):
        assert torch.equal(found[name].nan_to_num(7), expected[name].nan_to_num(7)), name
    seen = int(found["lengths"][1, 1])
    assert bool((found["keys"][seen:] == POISON).all())


@pytest.mark.parametrize("coded", [False, True])
def test_tiles_hold_what_rows_do(coded: bool) -> None:
    """Swizzled, in halves, and filled up with zeros."""
    case = Gather(32, 300, 256, 30, window=40, heads=1, dim=128, coded=coded)
    expected = case.arrays()
    wanted_rows(**expected, **case.options)
    empty = {name: torch.full(tiles_shape(200, 1, 128), torch.nan).bfloat16() for name in ("keys", "values")}
    found = walked(case, **empty)
    pieces = torch.arange(8)[None] ^ (torch.arange(ALIGNMENT) % 8)[:, None]
    for name in ("keys", "values"):
        halves = found[name].view(1, 2, 2, ALIGNMENT, 8, 8)[:, :, :, torch.arange(ALIGNMENT)[:, None], pieces]
        rows = halves.reshape(1, 2, 2, ALIGNMENT, 64).permute(1, 3, 0, 2, 4).reshape(-1, 1, 128)  # position, head
        wanted = torch.zeros(256, 1, 128)
        wanted[:160] = expected[name][:160].float()
        assert torch.equal(rows.float().nan_to_num(7), wanted.nan_to_num(7)), name


@pytest.mark.parametrize("window", [None, 1, 40, 128, 129, 1000])
def test_rows_lie_where_they_do_in_chunks_of_any_size(window: int | None) -> None:
    """Blocks of ALIGNMENT rows hold the same positions, and nothing that a row sees is missing."""
    longest = 4096
    for size in (32, 128, 384, 512):
        for start in range(0, longest, 32):
            origin = 0 if window is None else max(start - (window - 1), 0) // ALIGNMENT * ALIGNMENT
            assert origin % ALIGNMENT == 0
            assert origin == 0 or window is None or origin <= start - window + 1
            assert start + size - origin <= gathered_rows(size, longest, window)


def test_rows_take_no_more_than_the_context_and_what_runs_past_it() -> None:
    assert [gathered_rows(128, longest, None) for longest in (1, 128, 1000)] == [128, 255, 1127]
    assert [gathered_rows(128, 4096, window) for window in (1, 128, 5000)] == [255, 382, 4223]
