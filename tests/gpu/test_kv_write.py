"""Keys and values of a step and of prefill stored to the caches on a GPU."""

import pytest
import torch
from kernel_cases import Bench
from kv_write_cases import Chunk
from row_cases import check_write

from lowlat.executors.launcher import Launcher
from lowlat.kernels import reference
from lowlat.kernels.attention.kv_write import prefill_kv_write
from lowlat.kernels.attention.place_table import place_table


@pytest.mark.parametrize(
    "case",
    [
        Chunk(128, 0, 128, dead=(0,), heads=8, block=32, dim=128),
        Chunk(512, 8192, 500, heads=8, block=64, dim=64),
        Chunk(32, 96, 0, heads=3),
        Chunk(512, 8192, 500, heads=8, block=64, dim=64, coded=True),
    ],
    ids=repr,
)
def test_rows_are_stored_where_the_reference_stores_them(case: Chunk) -> None:
    found, expected, launcher = case.arrays("cuda"), case.arrays(), Launcher(torch.device("cuda", 0))
    launcher.run(*prefill_kv_write(**found))
    reference.kv.prefill_kv_write(**expected)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(found[name].cpu(), expected[name]), name


@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (1, 8), (3, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_s_rows_are_stored(heads: int, dim: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda", 0)
    for seed in range(5):
        check_write(Bench(device, Launcher(device).run), seed, heads=heads, dim=dim, dtype=dtype)


@pytest.mark.parametrize("width", [3, 256, 2051])
def test_a_slot_s_table_is_put_in_its_place(width: int) -> None:
    torch.manual_seed(width)
    table, slot = torch.randint(1, 1 << 20, (1, width)).int(), torch.tensor([5], dtype=torch.int32)
    tables = torch.randint(1, 1 << 20, (8, width)).int()
    found, launcher = tables.cuda(), Launcher(torch.device("cuda", 0))
    launcher.run(*place_table(table.cuda(), slot.cuda(), block_table=found))
    reference.kv.place_table(table, slot, block_table=tables)
    assert torch.equal(found.cpu(), tables)
