"""Flash attention of a prompt's rows, walked thread by thread on a CPU after the kernel that gathers its tiles."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_walk import Walker, walkable
from prefill_slots import Shape, Slot, close
from stages import wide
from walked_softmax import walkable_softmax

from lowlat.errors import ShapeError
from lowlat.kernels.attention.prefill.flash import has_prefill_flash, prefill_flash
from lowlat.kernels.attention.prefill.gathered_rows import gathered_rows, tiles_shape
from lowlat.kernels.gemm.prefill.activation_layout import arranged_shape
from lowlat.kernels.toolchain.kernel import H200, Gpu

pytestmark = pytest.mark.second

NAMES = ("attention.prefill.gather_kv", "attention.prefill.flash")
SMALL = Shape(64, 2, 1, 64, 16, 500)


def walked(
    slot: Slot, sinks: torch.Tensor | None, part: tuple[int, int] | None = None, *, window: int | None = None,
    first: int = 0, groups: int = 2, arranged: bool = False, softcap: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """The kernels' results of all rows, or of a part as a launch alone; NaN where nothing is written.

    arranged  as the kernel leaves them, then
    """
    shape, chunk = slot.shape, slot.chunk
    offset, size = part or (0, shape.size)
    if part is not None:
        chunk = torch.tensor([slot.start + offset, max(0, min(slot.count - offset, size))], dtype=torch.int32)
    q = slot.q[offset : offset + size].contiguous()
    room = tiles_shape(gathered_rows(size, shape.longest, window), shape.groups, shape.dim)
    keys, values = (torch.full(room, torch.nan).bfloat16() for _ in range(2))
    room_of_rows = arranged_shape(size, q[0].numel()) if arranged else q.shape
    out, lengths = torch.full(room_of_rows, torch.nan).bfloat16(), torch.zeros(2, 2, dtype=torch.int32)
    given = {"sinks": sinks, "out": out, "scale": slot.scale, "gpu": H200, "groups": groups, "arranged": arranged}
    given["softcap"] = softcap
    gathering = {"k_cache": slot.caches[0], "v_cache": slot.caches[1], "block_table": slot.table, "size": size}
    with walkable_softmax(walker := Walker(), *NAMES) as modules:
        gather, flash = modules
        gpu: Any = replace(H200, num_multiprocessors=1)
        seen = {"keys": keys, "values": values, "chunk": chunk, "window": window, "first": first}
        walker.run(
            *gather.gather_kv(**gathering, **seen, lengths=lengths, gpu=gpu),
            *flash.prefill_flash(q=q, **seen, **given),
        )
    return out if arranged else out.view(size, -1)


@pytest.mark.parametrize(
    ("shape", "start", "count", "window", "first", "with_sinks"),
    [
        (SMALL, 0, 64, None, 0, False),
        (replace(SMALL, size=40), 250, 33, None, 1, True),
        (replace(SMALL, dim=128, size=72), 128, 72, None, 0, False),
        (replace(SMALL, dim=512, size=40), 120, 33, None, 0, False),
        wide(replace(SMALL, dim=256, size=130), 60, 130, None, 0, True),
        wide(replace(SMALL, dim=512, size=72), 250, 72, 129, 1, True),
        wide(SMALL, 320, 64, 100, 0, True),
        wide(replace(SMALL, dim=128, size=32), 400, 32, None, 0, True),
        wide(replace(SMALL, size=130), 0, 130, 1, 1, False),
    ],
)
def test_attention_is_the_reference_s(
    shape: Shape, start: int, count: int, window: int | None, first: int, with_sinks: bool
) -> None:
    """All of the pool that was not written is NaN, and so is shared memory; dead rows are finite."""
    slot, sinks = Slot(start, count, shape=shape), torch.linspace(-3, 3, shape.heads) if with_sinks else None
    sinks = sinks if sinks is None or window is None else sinks.bfloat16()
    found = walked(slot, sinks, window=window, first=first)
    assert close(found[: slot.count], slot.expected(sinks, window=window, first=first), 8e-3)
    assert bool(found.isfinite().all())
    assert start or not first or not bool(found[0].any())


@pytest.mark.parametrize(("dim", "window"), [(64, None), wide(256, 70), wide(512, 70)])
def test_bits_of_rows_do_not_depend_on_the_launch(dim: int, window: int | None) -> None:
    """Of 48 rows in one launch, and in launches of 16 and 32 that begin elsewhere, of blocks of other sizes."""
    slot = Slot(112, 48, shape=replace(SMALL, heads=1, size=48, dim=dim))
    whole, fewer = walked(slot, None, window=window), 1 if dim < 512 else 2
    cuts = (((0, 16), fewer), ((16, 32), 2))
    parts = [walked(slot, None, part, groups=groups, window=window) for part, groups in cuts]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(
    ("shape", "start", "count", "groups"),
    [
        (replace(SMALL, size=40), 250, 33, 1),
        wide(replace(SMALL, dim=128, size=72), 128, 72, 2),
        wide(replace(SMALL, dim=256, size=40), 30, 40, 1),
        wide(replace(SMALL, dim=512, size=40), 30, 40, 2),
    ],
)
def test_rows_that_are_left_arranged_have_the_bits_of_an_arrangement(
    shape: Shape, start: int, count: int, groups: int
) -> None:
    """Dead rows too."""
    slot = Slot(start, count, shape=shape)
    rows, found = walked(slot, None, groups=groups), walked(slot, None, groups=groups, arranged=True)
    want = torch.full(arranged_shape(*rows.shape), torch.nan).bfloat16()
    with walkable(walker := Walker(), "gemm.prefill.activation_layout") as (layout,):
        walker.run(*layout.arrange(x=rows, out=want))
    assert torch.equal(found.view(torch.int16), want.view(torch.int16)) and bool(found.isfinite().all())
    assert bool(found.any())


@pytest.mark.parametrize("dim", [64, wide(256)])
def test_scores_are_capped(dim: int) -> None:
    """Scores far above the cap, of both signs, and small ones; with sinks."""
    slot, sinks = Slot(70, 40, shape=replace(SMALL, size=40, dim=dim)), torch.linspace(-3, 3, SMALL.heads)
    slot.q[:, 0] *= 20
    found = walked(slot, sinks, softcap=3.0)
    assert close(found, slot.expected(sinks, softcap=3.0), 8e-3)
    assert not close(found, slot.expected(sinks), 8e-3)


def test_what_does_not_fit_is_refused() -> None:
    q, tiles = torch.zeros(8, 4, 64).bfloat16(), torch.zeros(tiles_shape(8, 2, 64)).bfloat16()
    given: dict[str, Any] = {"q": q, "keys": tiles, "values": tiles, "chunk": torch.zeros(2).int(), "out": q.clone()}
    given |= {"scale": 1.0, "gpu": H200}
    assert len(prefill_flash(**given)) == 1 == len(prefill_flash(**{**given, "out": q.view(8, 256)}))
    assert not has_prefill_flash(Gpu(108, 163 * 1024, (8, 0)), 64) and not has_prefill_flash(H200, 96)
    for changed in (
        {"q": q.float()},
        {"q": q[:, :3].contiguous(), "out": q[:, :3].contiguous()},
        {"values": tiles[:1]},
        {"scale": 0.0},
        {"groups": 3},
        {"arranged": True},
        {"out": torch.zeros(arranged_shape(64, 256)).bfloat16()},
        {"out": torch.zeros(8, 4 * 64 + 8).bfloat16()},
        {"out": torch.zeros(4, 8, 64).bfloat16()},
        {"sinks": torch.zeros(3)},
        {"sinks": torch.zeros(4).half()},
        {"q": q.transpose(0, 1).contiguous().transpose(0, 1)},
    ):
        with pytest.raises(ShapeError):
            prefill_flash(**{**given, **changed})
