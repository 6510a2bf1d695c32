"""The end of a step on a GPU."""

import pytest
from kernel_cases import Bench
from publish_cases import check_publish


@pytest.mark.parametrize("drafting", ["no", "fused", "alone"])
@pytest.mark.parametrize("group", [1, 4])
def test_against_the_reference(bench: Bench, group: int, drafting: str) -> None:
    for seed in range(10 * group, 10 * group + 10):
        check_publish(bench, seed, drafting=drafting, batch=4)
