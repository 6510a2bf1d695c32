"""Packed weights: the bits of products in blocks of rows, whatever the number of rows, or no packed weight at all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stages import wide

from lowlat import Runtime, SamplingParams
from lowlat.executors.reference import executor
from lowlat.kernels.reference.gemm import packed as module
from lowlat.kernels.reference.gemm.linear import linear, packed_linear
from lowlat.kernels.reference.gemm.linear_block import ROW_BLOCK
from lowlat.kernels.reference.gemm.packed import PackedWeight, pack


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers as bf16 has them, in float32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


@pytest.mark.parametrize(("width", "depth"), [wide(512, 576), (24, 320), wide(1001, 300)])
def test_packed_rows_have_the_bits_of_blocks(width: int, depth: int) -> None:
    weight, x = drawn(width, depth), drawn(19, depth, seed=1)
    if (packed := pack(weight)) is None:
        pytest.skip("this processor adds in another order than packed weights do")
    for rows in (1, 2, 7, 8, 19):
        expected, found = torch.empty(2, rows, width)
        linear(x[:rows], weight, out=expected)
        packed_linear(x[:rows], packed, out=found, row_block=ROW_BLOCK)
        assert torch.equal(expected, found), rows


def test_a_weight_of_other_bits_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = drawn(512, 1536)
    assert not PackedWeight(weight, 97).agrees(weight)  # parts of K that no library adds up
    monkeypatch.setattr(module, "_part_of", lambda depth, threads: 97)
    assert pack(weight) is None


@pytest.mark.wide
def test_packing_leaves_the_number_of_torch_threads() -> None:
    code = (
        "import torch; torch.set_num_threads(1); from lowlat.kernels.reference.gemm.packed import pack\n"
        "pack(torch.ones(64, 64)); print(torch.get_num_threads())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "1", done.stderr


def test_what_is_no_bf16_stays_as_it_is() -> None:
    assert pack(drawn(512, 1536).bfloat16()) is None  # a reference on a GPU reads it so
    assert pack(drawn(512, 1536) + 1e-6) is None


def test_a_runtime_decodes_the_same_with_and_without_packed_weights(
    monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    packs: list[PackedWeight | None] = []

    def packed(weight: torch.Tensor) -> PackedWeight | None:
        packs.append(pack(weight))
        return packs[-1]

    monkeypatch.setattr(executor, "pack", packed)
    answers = []
    for fewest_bytes in (executor.FEWEST_BYTES, 1 << 20):
        monkeypatch.setattr(executor, "FEWEST_BYTES", fewest_bytes)
        with Runtime.load(
            repository / "lowlat" / "demo" / "target", device="cpu", max_batch=2, max_context=64
        ) as runtime:
            for temperature in (0.0, 1.0):
                runtime.submit("The President shall", SamplingParams(max_tokens=8, temperature=temperature, seed=5))
            answers.append([output.token_ids for _ in range(16) for output in runtime.step()])
        assert bool(packs) == (fewest_bytes == 1 << 20)
    assert answers[0] == answers[1] and len(answers[0]) > 8
