"""Fibers that stand for a block's threads: they meet, sleep and wake, and whoever waits for nothing is found."""

from collections.abc import Callable

import pytest
from fibers import Fiber, Fibers, this_fiber


def run(count: int, body: Callable[["Fibers"], None], seed: int = 0) -> Fibers:
    block = Fibers([Fiber(number, lambda: body(block)) for number in range(count)], seed)
    block.run()
    return block


def test_the_order_is_by_chance_and_can_be_repeated() -> None:
    def order(seed: int) -> list[int]:
        met: list[int] = []

        def body(block: Fibers) -> None:
            met.append(this_fiber().number)
            block.meet("all", 16)
            met.append(this_fiber().number)

        run(16, body, seed)
        return met

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == sorted([*range(16), *range(16)])


def test_who_waits_for_nothing_is_found() -> None:
    def body(block: Fibers) -> None:
        if this_fiber().number:
            block.meet("barrier 1", 3)
        else:
            block.sleep("phase at 8")

    with pytest.raises(AssertionError) as caught:
        run(3, body)
    assert "'barrier 1': 2" in str(caught.value) and "'phase at 8': 1" in str(caught.value)


def test_a_failure_comes_out_and_nobody_is_left() -> None:
    left: list[int] = []

    def body(block: Fibers) -> None:
        number = this_fiber().number
        try:
            if number == 2:
                raise ValueError("wrong")
            block.meet("all", 4)
        finally:
            left.append(number)

    with pytest.raises(ValueError, match="wrong"):
        run(4, body)
    assert 2 in left
