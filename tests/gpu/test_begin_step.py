"""The start of a step on a GPU."""

import pytest
from begin_step_cases import check_begin_step
from kernel_cases import Bench


@pytest.mark.parametrize(("batch", "context"), [(1, 30), (4, 3000), (8, 30), (32, 300)])
def test_against_the_reference(bench: Bench, batch: int, context: int) -> None:
    for seed in range(12):
        sizes = {"max_batch": max(batch, 8), "num_commands": seed % 7, "context": context}
        check_begin_step(bench, seed, batch=batch, **sizes, how=("fused", "alone", "given")[seed % 3])
