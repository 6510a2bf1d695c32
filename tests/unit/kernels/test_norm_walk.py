"""A step's norms, walked thread by thread: launches that let the next one start before they wait themselves."""

import pytest
import torch
from kernel_walk import Walker, walkable
from rowwise_cases import EPS, canonical_norm, flags, poison, same_bits, weights
from stages import wide

pytestmark = pytest.mark.second

NAMES = ("elementwise.norm", "elementwise.norm_add")


@pytest.mark.parametrize(("rows", "width", "with_dead"), [(3, 72, True), (1, 296, False), wide(2, 4096 + 264, True)])
def test_a_chain_of_launches_that_start_at_once_has_the_bits_of_one_after_the_other(
    rows: int, width: int, with_dead: bool
) -> None:
    """A sum with its norm, the norm of the sum, and a sum of that: each reads what the one before it wrote."""
    x, residual = torch.randn(rows, width).bfloat16() * 3, torch.randn(rows, width).bfloat16()
    first, second = weights(width), weights(width)
    live = flags(rows) if with_dead else None
    made: dict[bool, list[torch.Tensor]] = {}
    for early in (False, True):
        total, normed, again, last = made[early] = [poison(rows, width) for _ in range(4)]
        own = {"triggers_first": early}
        with walkable(walker := Walker(), *NAMES) as (norm, summing):
            sums = {"weight": first, "eps": EPS, "next_weight": second, "next_eps": 2 * EPS, "row_live": live}
            calls = summing.norm_add(x, residual=residual, **sums, total=total, out=normed, **own)
            calls += norm.rms_norm(total, second, live, out=again, eps=2 * EPS, **own)
            calls += summing.norm_add(again, first, normed, live, total=last, eps=EPS, **own)
            assert all(call.kernel.waits_before_trigger != early for call in calls)
            walker.run(*calls)
    assert all(same_bits(*pair) for pair in zip(made[False], made[True], strict=True))
    assert same_bits(made[True][1], made[True][2]) and bool(made[True][3].isfinite().all())


@pytest.mark.parametrize("width", [40, 264, 520])
def test_blocks_of_few_warps_sum_in_the_promised_order(width: int) -> None:
    """A block has as many warps as the row has chunks for: the order of all of them, whose others add zeros."""
    x, residual, weight = torch.randn(4, width).bfloat16() * 3, torch.randn(4, width).bfloat16(), weights(width)
    total, normed = poison(4, width), poison(4, width)
    with walkable(walker := Walker(), *NAMES) as (_, summing):
        calls = summing.norm_add(x, None, residual, next_weight=weight, total=total, out=normed, next_eps=EPS)
        assert calls[0].kernel.threads == -(-width // 256) * 32
        walker.run(*calls)
        alone = [poison(1, width) for _ in range(2)]
        own = {"next_weight": weight, "total": alone[0], "out": alone[1], "next_eps": EPS}
        walker.run(*summing.norm_add(x[2:3], None, residual[2:3], **own))
    assert same_bits(total, (x.float() + residual.float()).bfloat16())
    assert same_bits(normed, canonical_norm(total, weight, EPS))
    assert same_bits(alone[0][0], total[2]) and same_bits(alone[1][0], normed[2])
