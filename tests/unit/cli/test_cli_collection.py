"""The garbage collector runs rarely while a command plans or loads, and as before afterwards."""

import gc
from collections.abc import Iterator

import pytest

from lowlat.cli.collection import YOUNG_OBJECTS, rare_collections


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_collections_are_rare_inside_and_as_before_afterwards() -> None:
    gc.set_threshold(701, 11, 12)
    with pytest.raises(ValueError, match="inside"), rare_collections():
        assert gc.get_threshold()[:2] == (YOUNG_OBJECTS, 11)
        with rare_collections():
            assert gc.get_threshold()[0] == YOUNG_OBJECTS
        assert gc.get_threshold()[0] == YOUNG_OBJECTS
        raise ValueError("inside")
    assert gc.get_threshold()[:2] == (701, 11)


@pytest.mark.parametrize("young", [0, 2 * YOUNG_OBJECTS])
def test_what_was_rarer_stays_so(young: int) -> None:
    gc.set_threshold(young, 10, 10)
    with rare_collections():
        assert gc.get_threshold()[0] == young
    assert gc.get_threshold()[0] == young


def test_a_function_may_be_called_so_again_and_again() -> None:
    gc.set_threshold(700, 10, 10)

    @rare_collections()
    def count() -> int:
        return gc.get_threshold()[0]

    assert [count(), count()] == [YOUNG_OBJECTS] * 2
    assert gc.get_threshold()[0] == 700
