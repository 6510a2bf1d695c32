"""Compaction of the KV cache on a GPU."""

import pytest
import torch
from kernel_cases import Bench
from row_cases import check_compaction


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_against_the_reference(bench: Bench, dtype: torch.dtype) -> None:
    for seed in range(10):
        check_compaction(bench, seed, layers=1 + seed % 3, dtype=dtype)
