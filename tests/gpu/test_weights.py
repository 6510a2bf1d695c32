"""Weights streamed to a GPU through pinned memory that is used again and again: not a byte is lost."""

from pathlib import Path

import pytest
import torch
from tiny_models import make_target, mxfp4_target

from lowlat.checkpoint import stored
from lowlat.checkpoint.source import streamed
from lowlat.kernels.gemm.packing import PackedMatrix, unpack
from lowlat.lowering.device_weights import DeviceWeights
from lowlat.models.target import load_target, open_target


@pytest.fixture(params=["llama", "gpt_oss", "mxfp4"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "mxfp4":
        mxfp4_target(tmp_path)
    else:
        make_target(tmp_path, request.param, tie_word_embeddings=request.param == "llama")
    return tmp_path


def test_what_arrives_is_what_is_stored(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MIN_AHEAD_BYTES", 0)  # two tensors of room: every place is used many times
    whole = load_target(directory, dtype="bfloat16").weights
    device = torch.device("cuda", 0)
    found: dict[str, torch.Tensor] = {}
    with streamed(open_target(directory, dtype="bfloat16").weights, device) as stream:
        for names, tensor in stream:
            assert tensor.device.type == "cpu" and tensor.is_pinned()
            found.update(dict.fromkeys(names, tensor.to(device)))
    assert set(found) == set(whole)
    for name, tensor in whole.items():
        assert torch.equal(found[name].cpu(), tensor), name


def test_packed_weights_are_the_same_from_files_and_from_memory(tmp_path: Path) -> None:
    make_target(tmp_path, "llama", tie_word_embeddings=True)
    whole = load_target(tmp_path, dtype="bfloat16").weights
    matrices = {name for name, tensor in whole.items() if tensor.dim() == 2}
    held = DeviceWeights(open_target(tmp_path, dtype="bfloat16").weights, matrices, torch.device("cuda", 0))
    for name, tensor in whole.items():
        placed = held.table(name)
        assert torch.equal((unpack(placed) if isinstance(placed, PackedMatrix) else placed).cpu(), tensor), name
