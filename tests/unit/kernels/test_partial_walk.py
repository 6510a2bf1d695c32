"""SpecPV's kernels, walked thread by thread on a CPU: summaries, choices and attention over lists."""

from typing import Any

import pytest
import torch
from attention_cases import chain, check, tree
from kernel_walk import Walker, walkable
from partial_cases import PartialCase

from lowlat.errors import ShapeError
from lowlat.kernels import reference
from lowlat.kernels.attention.attention import partial_attention
from lowlat.kernels.attention.partial.block_lists import choose_blocks, list_lens
from lowlat.kernels.attention.partial.block_summary import summarise_blocks
from lowlat.kernels.toolchain.kernel import Gpu

SMALL = Gpu(1, 227 * 1024, (9, 0))


def workspace(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype)


@pytest.mark.parametrize(("length", "first", "coded"), [(203, 100, False), (64, 0, False), (75, 0, True)])
def test_summaries_are_the_reference_s(length: int, first: int, coded: bool) -> None:
    found, expected = PartialCase(length), PartialCase(length)
    for case in (found, expected) if coded else ():
        case.encode(torch.tensor([[0.03125, 2.0], [1.0, 1.0]]))
    with walkable(walker := Walker(), "attention.partial.block_summary") as modules:
        walker.run(*modules[-1].summarise_blocks(**found.span(first), gpu=SMALL))
    reference.partial.summarise_blocks(**expected.span(first))
    assert torch.equal(found.summary, expected.summary)


@pytest.mark.parametrize(("length", "dim", "equal"), [(415, 64, False), (270, 128, True), (60, 64, False)])
def test_lists_are_the_reference_s(length: int, dim: int, equal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where many scores are equal, and where nothing is left out."""
    found, expected = PartialCase(length, dim=dim), PartialCase(length, dim=dim)
    for case in (found, expected):
        if equal:
            case.k_cache[case.table[0, 2:].long()] = 0.25
        reference.partial.summarise_blocks(**case.span())
    with walkable(walker := Walker(), "attention.partial.block_lists") as modules:
        kernels: Any = modules[-1]
        monkeypatch.setattr(kernels, "SCORERS", 32)
        monkeypatch.setattr(kernels, "BLOCKS", 2)
        monkeypatch.setattr(kernels, "CHOOSERS", 64)
        monkeypatch.setattr(kernels, "DIGIT_BITS", 4)  # no more digits than threads
        monkeypatch.setattr(kernels, "DIGITS", 16)
        for call in kernels.choose_blocks(**found.choice(), workspace=workspace, gpu=SMALL):
            walker.run(call)
    reference.partial.choose_blocks(**expected.choice())
    assert torch.equal(found.lists, expected.lists)


def test_lens_are_the_reference_s() -> None:
    lens, slots = torch.tensor([100, 50, 9], dtype=torch.int32), torch.tensor([2, 0, -1], dtype=torch.int32)
    shifts, found, expected = (
        torch.tensor([0, 7, 32], dtype=torch.int32),
        torch.empty_like(lens),
        torch.empty_like(lens),
    )
    with walkable(walker := Walker(), "attention.partial.block_lists") as modules:
        walker.run(*modules[-1].list_lens(lens, slots, shifts, out=found))
    reference.partial.list_lens(lens, slots, shifts, out=expected)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("masks", [chain(2), tree(3, 2)], ids=["chain", "tree"])
def test_attention_over_lists_is_the_reference_s(masks: list[int]) -> None:
    case = PartialCase(175, kv_heads=1, heads=2)
    case.choose()
    found, expected = case.attended(masks), case.attended(masks)
    walker = Walker(True, may_leave=True)
    with walkable(walker, "attention.attention") as modules:
        calls = modules[-1].partial_attention(**found, workspace=workspace, num_blocks=3, early_metadata=True)
        for call in calls:
            walker.run(call)
    reference.partial.partial_attention(**expected)
    check(found["out"], expected["out"])


def test_what_does_not_fit_is_refused() -> None:
    case = PartialCase(390)
    span, choice = case.span(), case.choice()
    refused: list[tuple[Any, dict[str, Any]]] = [
        (summarise_blocks, {**span, "k_cache": case.k_cache.float()}),
        (summarise_blocks, {**span, "key_summary": case.summary[:, :1]}),
        (choose_blocks, {**choice, "q": case.q.float(), "workspace": workspace}),
        (choose_blocks, {**choice, "shifts": case.shifts[:1], "workspace": workspace}),
        (partial_attention, {**case.attended(chain(2)), "block": 8, "workspace": workspace}),
        (list_lens, {name: torch.zeros(33, dtype=torch.int32) for name in ("dense_lens", "slots", "shifts", "out")}),
    ]
    for build, given in refused:
        with pytest.raises(ShapeError):
            build(**given)
