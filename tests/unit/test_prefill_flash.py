"""Attention of prefill as on a GPU, where torch's flash attention and the gathering kernel are stood in for."""

from dataclasses import replace

import pytest
import torch
from prefill_slots import BLOCK, DIM, GROUPS, HEADS, LONGEST, SIZE, SMALL, Slot, close
from prefill_stand_ins import GatherLauncher, flash_attention, flash_parts

from lowlat.errors import ConfigError, ShapeError
from lowlat.lowering import prefill_attention as flash

STARTS = (0, 32, 96, 160, 288)
SINKS = torch.linspace(-3, 3, HEADS)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "flash_attention", flash_attention)
    monkeypatch.setattr(flash, "flash_parts", flash_parts)
    monkeypatch.setattr(flash, "efficient_attention", None)


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 40, 129, 500])
@pytest.mark.parametrize("start", STARTS)
def test_attention_is_the_reference_s(start: int, window: int | None, sinks: torch.Tensor | None) -> None:
    """Of partial chunks too; dead rows are finite."""
    for count in (SIZE, SIZE - 3, 1):
        slot = Slot(start, count)
        found = slot.flash(GatherLauncher(), sinks, window=window)
        assert close(found[: slot.count], slot.expected(sinks, window=window), 8e-3)
        assert bool(found.isfinite().all())


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize("start", [0, 33, 160, 287])
def test_a_refresh_adds_up_parts(start: int, sinks: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it begins anywhere, in parts that are whole, begun and empty."""
    monkeypatch.setattr(flash, "PART", 64)
    for count in (SIZE, 3):
        slot = Slot(start, count)
        found = slot.flash(GatherLauncher(), sinks, lower=flash.refresh_attention)
        assert close(found[: slot.count], slot.expected(sinks), 8e-3)
        assert bool(found.isfinite().all())


@pytest.mark.parametrize("window", [None, 40, 129])
@pytest.mark.parametrize("start", STARTS)
def test_positions_before_the_first_are_not_seen(start: int, window: int | None) -> None:
    """They may hold anything; a row before the first is zero."""
    slot = Slot(start, SIZE)
    for cache in slot.caches:
        cache[slot.table[0, 0], :, 0] = 1e4
    found = slot.flash(GatherLauncher(), None, window=window, first=1)
    assert close(found[: slot.count], slot.expected(None, window=window, first=1), 8e-3)
    assert start or not bool(found[0].any())
    assert bool((found.abs() < 100).all())


def test_all_rows_may_be_dead_and_nothing_be_written() -> None:
    for window in (None, 40):
        assert not bool(Slot(0, 0).flash(GatherLauncher(), SINKS, window=window).any())


WIDE = replace(SMALL, heads=2, groups=1, dim=512)


@pytest.mark.parametrize("window", [None, 40])
def test_heads_that_flash_attention_does_not_take_have_another(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "flash_attention", None)
    monkeypatch.setattr(flash, "efficient_attention", flash_attention)
    slot = Slot(96, SIZE, shape=WIDE)
    assert close(slot.flash(GatherLauncher(), None, window=window), slot.expected(None, window=window), 8e-3)


def test_what_torch_has_no_operation_for_is_refused_by_name() -> None:
    slot = Slot(0, SIZE)
    for lower in (flash.prefill_attention, flash.refresh_attention):
        with pytest.raises(ConfigError, match=rf"{lower.__name__} with softcap 50\.0 .* use executor 'reference'"):
            slot.flash(GatherLauncher(), None, lower=lower, softcap=50.0)
    with pytest.raises(ShapeError, match="head_dim must be a multiple of 8, at most 256, got 512"):
        Slot(0, SIZE, shape=WIDE).flash(GatherLauncher(), None, lower=flash.refresh_attention)


def test_other_dtypes_are_refused() -> None:
    slot = Slot(0, SIZE)
    slot.q = slot.q.half()
    with pytest.raises(ShapeError, match="must be bfloat16"):
        slot.flash(GatherLauncher(), None)


def test_torch_has_the_operation_with_the_arguments_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes of its results as torch itself infers them, where a window is given and where none is."""
    monkeypatch.undo()
    q = torch.empty(SIZE, HEADS, DIM, dtype=torch.bfloat16, device="meta")
    rows = torch.empty(LONGEST, GROUPS, DIM, dtype=torch.bfloat16, device="meta")
    lengths = torch.empty(2, 2, dtype=torch.int32, device="meta")
    for window in (None, BLOCK):
        attended, logarithms = flash.flash_attention(
            q, rows, rows, lengths, longest=LONGEST, window=window, scale=DIM**-0.5
        )
        assert attended.shape == q.shape and attended.dtype == q.dtype
        assert logarithms.shape == (HEADS, SIZE) and logarithms.dtype == torch.float32
        wide, own = (torch.empty(*each, 512, dtype=q.dtype, device="meta") for each in ((SIZE, 8), (LONGEST, 2)))
        attended, _ = flash.efficient_attention(wide, own, own, lengths, longest=LONGEST, window=window, scale=1.0)
        assert attended.shape == wide.shape
