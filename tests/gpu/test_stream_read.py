"""The streaming read on a GPU reads every word once, and the wall that follows is a plausible one."""

import pytest
import torch

from lowlat.kernels.common.stream_read import stream_read


def exclusive_or(words: torch.Tensor) -> int:
    folded = 0
    for word in words.tolist():
        folded ^= word
    return folded


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("vectors", [1, 1000, 132 * 2048, 132 * 4096 + 77])
def test_words_are_read_once(spread: bool, vectors: int) -> None:
    from lowlat.executors.launcher import Launcher

    device = torch.device("cuda", 0)
    source = torch.randint(-(2**31), 2**31 - 1, (vectors * 4,), dtype=torch.int32, device=device)
    out = torch.full((64 * 512,), -77, dtype=torch.int32, device=device)
    Launcher(device).run(*stream_read(source, out=out, blocks=64, spread=spread))
    assert exclusive_or(out) == exclusive_or(source)
