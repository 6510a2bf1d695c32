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


@pytest.mark.parametrize(("rows", "width", "with_dead"), [(3, 72, True), wide(2, 4096 + 264, False)])
def test_two_norms_have_the_bits_of_each_alone(rows: int, width: int, with_dead: bool) -> None:
    xs, live = [torch.randn(rows, width).bfloat16() * 3 for _ in range(2)], flags(rows) if with_dead else None
    scales = weights(width), weights(width)
    alone, found = ([poison(rows, width) for _ in range(2)] for _ in range(2))
    with walkable(walker := Walker(), *NAMES) as (norm, _):
        for x, weight, out in zip(xs, scales, alone, strict=True):
            walker.run(*norm.rms_norm(x, weight, live, out=out, eps=EPS))
        calls = norm.two_norms((xs[0], xs[1]), scales, live, outs=(found[0], found[1]), eps=EPS, triggers_first=True)
        assert len(calls) == 1
        walker.run(*calls)
    assert all(same_bits(*pair) for pair in zip(found, alone, strict=True)) and not same_bits(*found)


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
