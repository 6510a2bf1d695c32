"""The streaming read covers its memory exactly once, whatever the sizes; its loads are played by Python."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common import stream_read as module


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("vectors", [1, 31, 32, 95, 96, 97, 192, 500])
def test_every_vector_is_read_once(monkeypatch: pytest.MonkeyPatch, spread: bool, vectors: int) -> None:
    threads, blocks, source, out = 8, 3, 4096, 1 << 20
    seen: list[int] = []
    written: dict[int, int] = {}
    data = torch.randint(0, 2**32, (vectors, 4), dtype=torch.int64).tolist()

    def load(address: int) -> list[int]:
        seen.append((address - source) // 16)
        return list(data[seen[-1]])

    played = SimpleNamespace(
        load_global_nc_128=load, store_global_u32=written.__setitem__, wait_for_previous_kernel=lambda: None
    )
    monkeypatch.setattr(module, "ptx", played)
    monkeypatch.setattr(module, "uint32", lambda value: value & 0xFFFFFFFF)
    kernel = module._make(threads, blocks, spread)
    for block in range(blocks):
        for thread in range(threads):
            place: Any = SimpleNamespace(blockIdx=SimpleNamespace(x=block), threadIdx=SimpleNamespace(x=thread))
            monkeypatch.setattr(module, "cuda", place)
            kernel.function(source, vectors * 16, out)
    assert sorted(seen) == list(range(vectors))
    assert sorted(written) == [out + 4 * place for place in range(threads * blocks)]
    expected = folded = 0
    for word in (word for vector in data for word in vector):
        expected ^= word
    for word in written.values():
        folded ^= word
    assert folded == expected


def test_sizes_that_do_not_fit_are_refused() -> None:
    out = torch.zeros(2 * 512, dtype=torch.int32)
    (call,) = module.stream_read(torch.zeros(64), out=out, blocks=2)
    assert call.grid == (2, 1, 1)
    assert not call.dependent
    with pytest.raises(ShapeError, match="16 bytes"):
        module.stream_read(torch.zeros(3), out=out, blocks=2)
    with pytest.raises(ShapeError, match="contiguous"):
        module.stream_read(torch.zeros(8, 8).t(), out=out, blocks=2)
    with pytest.raises(ShapeError, match="out must be"):
        module.stream_read(torch.zeros(64), out=out, blocks=3)
