"""The tier of host memory: its budget, memory that changes its size, and what is pinned."""

import pytest
from tier_cases import host_tier, key

from lowlat.sequence.tiers.host import HostTier
from lowlat.sequence.tiers.key import ChunkKey


def put(tier: HostTier, number: int, size: int) -> bool:
    content = tier.reserve(size)
    if content is None:
        return False
    content.fill_(number)
    tier.put(key(number), content)
    return True


def test_the_host_tier_holds_no_more_than_its_budget_and_forgets_the_oldest() -> None:
    page = 4096
    tier = host_tier(16 * page)  # slabs of two pages
    assert all(put(tier, number, page) for number in range(18))
    assert key(1) not in tier and key(2) in tier and tier.num_bytes == 16 * page
    held = tier.get(key(2))  # is on its way to the device: its memory is nobody else's
    assert held is not None and put(tier, 20, page) and key(3) not in tier
    assert all(put(tier, number, page) for number in range(21, 36)) and key(2) not in tier
    assert held.tolist() == [2] * page and put(tier, 36, page) and len(tier) == 15
    assert not put(tier, 37, 2 * page + 1) and len(tier) == 15
    del held
    assert all(put(tier, number, 2 * page) for number in range(40, 44))
    assert put(tier, 50, 0) and key(50) in tier  # of blocks of which no layer keeps anything: all have windows
    assert tier.num_bytes <= 16 * page and all(key(number) in tier for number in range(40, 44))


@pytest.mark.parametrize(("before", "after"), [({1: 400, 18: 4}, {1: 20, 18: 20}), ({1: 64, 18: 21}, {1: 380, 18: 2})])
def test_memory_of_one_size_becomes_another_s(before: dict[int, int], after: dict[int, int]) -> None:
    """Contents that come in turn stay where they fit, whatever the sizes of those that were there: counts by pages."""
    tier = host_tier(512 * 4096)  # slabs of 64 pages
    missed = list[ChunkKey]()
    for pool, counts in (("", before), *[(".later", after)] * 3):
        missed.clear()
        for pages, count in counts.items():
            for number in range(count):
                name = ChunkKey(f"{pages} {number}".encode(), pool)
                if name not in tier:
                    content = tier.reserve(pages * 4096)
                    assert content is not None
                    tier.put(name, content)
                    missed.append(name)
                tier.touch(name)
    assert not missed


def test_pinned_contents_stay_while_others_can_go() -> None:
    page = 4096
    tier = host_tier(16 * page, key(0), key(1))
    assert all(put(tier, number, page) for number in range(30))
    assert key(0) in tier and key(1) in tier and key(15) not in tier and key(16) in tier
    tier = host_tier(16 * page, *map(key, range(20)))
    assert all(put(tier, number, page) for number in range(17))  # what is read from files needs some memory
    assert key(0) not in tier and key(1) in tier
