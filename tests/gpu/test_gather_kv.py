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
@pytest.mark.parametrize("shape", [LLAMA, OSS, WIDE], ids=["llama", "oss", "wide"])
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
@pytest.mark.parametrize("shape", [LLAMA, OSS], ids=["llama", "oss"])
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
