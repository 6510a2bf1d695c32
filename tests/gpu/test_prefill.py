"""Prefill on a GPU: whole chunks against the reference on the CPU, and rows that attention leaves arranged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from prefill_cases import NAMES, chunk_differences, make_named

from lowlat.executors.launcher import Launcher
from lowlat.kernels.attention.prefill.flash import GROUPS, has_prefill_flash, prefill_flash
from lowlat.kernels.attention.prefill.gathered_rows import tiles_shape
from lowlat.kernels.gemm.prefill.activation_layout import arrange, arranged_shape

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("live", [None, 5])
@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_is_the_reference_s(name: str, live: int | None, launcher: Launcher, tmp_path: Path) -> None:
    """Most positions within 4 %; a row whose router all but tied may choose another expert, and be seen by others."""
    torch.manual_seed(7)
    for buffer, differences in chunk_differences(make_named(name, tmp_path), launcher, live=live).items():
        assert float((differences < 4e-2).double().mean()) > 0.75, buffer
        assert name != "llama" or float(differences.max()) < 4e-2, buffer


@pytest.mark.parametrize(("heads", "num_heads", "dim"), [(8, 2, 64), (32, 8, 128), (8, 4, 256), (16, 2, 512)])
@pytest.mark.parametrize("rows", [40, 64, 200, 512])
def test_attention_that_leaves_its_rows_arranged_changes_no_bit(
    rows: int, heads: int, num_heads: int, dim: int, launcher: Launcher
) -> None:
    """Its result is that of attention and `arrange`, dead rows too."""
    if not has_prefill_flash(launcher.gpu, dim):
        pytest.skip("this GPU has no flash attention of ours")
    torch.manual_seed(3)
    q = torch.randn(rows, heads, dim, device=DEVICE).bfloat16()
    keys, values = (torch.randn(tiles_shape(1024, num_heads, dim), device=DEVICE).bfloat16() for _ in range(2))
    sinks = torch.randn(heads, device=DEVICE)
    chunk = torch.tensor([250, rows - 7], dtype=torch.int32, device=DEVICE)
    given: dict[str, Any] = {"q": q, "keys": keys, "values": values, "chunk": chunk, "sinks": sinks, "scale": 0.1}
    for groups in GROUPS if dim < 512 else (2,):
        plain = torch.full_like(q, torch.nan)
        room = torch.full(arranged_shape(rows, heads * dim), torch.nan, device=DEVICE).bfloat16()
        want, found = room.clone(), room.clone()
        own = {**given, "gpu": launcher.gpu, "groups": groups}
        launcher.run(*prefill_flash(**own, out=plain), *arrange(x=plain.view(rows, -1), out=want))
        launcher.run(*prefill_flash(**own, out=found, arranged=True))
        torch.cuda.synchronize(DEVICE)
        assert torch.equal(found.view(torch.int16), want.view(torch.int16)) and bool(found.isfinite().all())
