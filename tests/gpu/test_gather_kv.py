"""Keys and values gathered for a chunk of prefill on a GPU, and flash attention over them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from gather_cases import Gather, wanted_rows
from prefill_slots import Shape, Slot, close

from lowlat.executors.launcher import Launcher
from lowlat.kernels.attention.prefill.gather_kv import gather_kv

DEVICE = torch.device("cuda", 0)
LONGEST = 20_000
LLAMA = Shape(128, 16, 4, 128, 32, LONGEST)
OSS = Shape(128, 16, 2, 64, 64, LONGEST)
WIDE = Shape(512, 8, 8, 128, 16, LONGEST)
SLIDING, FULL = Shape(128, 16, 8, 256, 32, LONGEST), Shape(128, 16, 2, 512, 32, LONGEST)  # Gemma's layers
MASKS: dict[str, dict[str, Any]] = {
    "all": {},
    "window": {"window": 128},
    "wide": {"window": 3000},
    "one": {"window": 1},
}


@pytest.mark.parametrize(
    "case",
    [
        Gather(32, 300, 0, 0, heads=3),
        Gather(32, 300, 288, 11, heads=3),
        Gather(64, 400, 384, 16, window=100, heads=3),
        Gather(128, LONGEST, 16_000, 77, heads=4, block=32, dim=128),
        Gather(512, LONGEST, 0, 512, block=64, dim=64),
        Gather(512, LONGEST, 8192, 511, window=128, block=64, dim=64),
        Gather(512, LONGEST, 0, 512, first=1, block=64, dim=64),
        Gather(512, LONGEST, 8192, 500, block=32, dim=128, coded=True),
        Gather(512, LONGEST, 8192, 500, window=512, block=32, dim=512),
    ],
    ids=repr,
)
def test_rows_of_the_reference(case: Gather, launcher: Launcher) -> None:
    found, expected = case.arrays("cuda"), case.arrays()
    launcher.run(*gather_kv(**found, **case.options, gpu=launcher.gpu))
    wanted_rows(**expected, **case.options)
    for name in ("keys", "values", "lengths"):
        assert torch.equal(found[name].cpu().nan_to_num(7), expected[name].nan_to_num(7)), name


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", [LLAMA, OSS, WIDE, SLIDING, FULL], ids=["llama", "oss", "wide", "sliding", "full"])
@pytest.mark.parametrize("start", [0, 512, 16_384])
def test_attention_of_a_chunk_is_the_reference_s(start: int, shape: Shape, mask: str, launcher: Launcher) -> None:
    """Rows all live, some, and one; with sinks and without; all of the pool that was not written is NaN."""
    cases = [(shape.size, True), (shape.size - 37, False), *([] if start else [(1, True)])]
    for count, with_sinks in cases:
        slot = Slot(start, count, shape=shape, device="cuda")
        sinks = torch.linspace(-3, 3, shape.heads, device=DEVICE) if with_sinks else None
        found = slot.flash(launcher, sinks, **MASKS[mask])
        assert close(found[: slot.count], slot.expected(sinks, **MASKS[mask]), 8e-3)
        assert bool(found.isfinite().all())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", [LLAMA, OSS, SLIDING, FULL], ids=["llama", "oss", "sliding", "full"])
def test_bits_of_rows_do_not_depend_on_the_chunk_s_size(shape: Shape, mask: str, launcher: Launcher) -> None:
    """Nor on how many rows after them are live."""
    shape, sinks = replace(shape, size=512), torch.linspace(-3, 3, shape.heads, device=DEVICE)
    for start in (0, 1024, 8192):
        slot = Slot(start, 512, shape=shape, device="cuda")
        for own in (None, sinks):
            whole = slot.flash(launcher, own, **MASKS[mask])
            for size in (128, 32):
                parts = [slot.flash(launcher, own, (at, size), **MASKS[mask]) for at in range(0, 512, size)]
                assert torch.equal(torch.cat(parts), whole), size
        fewer = Slot(start, 512, shape=shape, device="cuda")
        fewer.count, fewer.chunk[1] = 300, 300
        assert torch.equal(fewer.flash(launcher, sinks, **MASKS[mask])[:300], whole[:300])


class OlderLauncher:
    """A launcher that says that its GPU is of an older capability: flash attention is torch's there."""

    def __init__(self, launcher: Launcher) -> None:
        self.gpu = replace(launcher.gpu, capability=(8, 0))
        self.load, self.issue = launcher.load, launcher.issue


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", [SLIDING, FULL], ids=["sliding", "full"])
def test_wide_heads_have_attention_of_torch_on_other_gpus(shape: Shape, mask: str, launcher: Launcher) -> None:
    """Its rows' bits do not depend on the chunk's size."""
    shape, older = replace(shape, size=256), OlderLauncher(launcher)
    for start in (0, 8192):
        slot = Slot(start, 200, shape=shape, device="cuda")
        whole = slot.flash(older, None, **MASKS[mask])
        assert close(whole[: slot.count], slot.expected(None, **MASKS[mask]), 8e-3)
        assert bool(whole.isfinite().all())
        for size in (128, 32):
            parts = [slot.flash(older, None, (at, size), **MASKS[mask]) for at in range(0, 256, size)]
            assert torch.equal(torch.cat(parts)[:200], whole[:200]), size


@pytest.mark.parametrize("shape", [LLAMA, SLIDING, FULL], ids=["llama", "sliding", "full"])
@pytest.mark.parametrize("window", [None, 128])
def test_scores_of_a_chunk_are_capped(shape: Shape, window: int | None, launcher: Launcher) -> None:
    """Far above the cap, of both signs, and small; with sinks, too."""
    for start, cap, with_sinks in ((0, 3.0, True), (8192, 50.0, False)):
        slot = Slot(start, shape.size - 37, shape=shape, device="cuda")
        slot.q[:, 0], slot.q[:, 1] = slot.q[:, 0] * 40, slot.q[:, 1] * 0.01
        sinks = torch.linspace(-3, 3, shape.heads, device=DEVICE) if with_sinks else None
        found = slot.flash(launcher, sinks, window=window, softcap=cap)
        assert close(found[: slot.count], slot.expected(sinks, window=window, softcap=cap), 8e-3)
        assert not close(found[: slot.count], slot.expected(sinks, window=window), 8e-3)


@pytest.mark.parametrize("mask", ["all", "window"])
def test_captured_attention_serves_every_start(mask: str, launcher: Launcher) -> None:
    """Bits of the same operations launched one by one."""
    slot = Slot(16_384, 512, shape=WIDE, device="cuda")
    sinks, stream = torch.linspace(-3, 3, WIDE.heads, device=DEVICE), torch.cuda.Stream(DEVICE)
    run, out = slot.prepare(launcher, sinks, **MASKS[mask])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    for start, live in ((0, 512), (0, 0), (512, 100), (8192, 512), (16_384, 512)):
        slot.chunk.copy_(torch.tensor([start, live]))
        expected = slot.flash(launcher, sinks, **MASKS[mask])
        out.fill_(torch.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.replay()
        stream.synchronize()
        assert torch.equal(out, expected)
    graph.reset()
