"""Keys and values of prefill stored to the caches on a card."""

import pytest
import torch
from kv_write_cases import Chunk

from lowlat.executors.launcher import Launcher
from lowlat.kernels import reference
from lowlat.kernels.attention.prefill_kv_write import prefill_kv_write

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "case",
    [
        Chunk(128, 0, 128, dead=(0,), heads=8, block=32, dim=128),
        Chunk(512, 8192, 500, heads=8, block=64, dim=64),
        Chunk(32, 96, 0, heads=3),
    ],
    ids=repr,
)
def test_rows_are_stored_where_the_reference_stores_them(case: Chunk) -> None:
    found, expected, launcher = case.arrays("cuda"), case.arrays(), Launcher(torch.device("cuda", 0))
    launcher.run(*prefill_kv_write(**found))
    reference.kv.prefill_kv_write(**expected)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(found[name].cpu(), expected[name]), name
