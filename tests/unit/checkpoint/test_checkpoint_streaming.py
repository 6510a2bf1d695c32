"""Weights streamed from files: the same as loaded whole, in bounded memory, and nothing left after."""

import json
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import make_target, mxfp4_target

from lowlat import Runtime
from lowlat.checkpoint import stored
from lowlat.checkpoint.source import JoinedWeights, shapes_of, streamed
from lowlat.checkpoint.stored import StoredWeights, _Ring
from lowlat.errors import ConfigError
from lowlat.kernels.gemm.packing import PackedMatrix, unpack
from lowlat.lowering.device_weights import DeviceWeights
from lowlat.models.target import load_target, open_target

CPU, META = torch.device("cpu"), torch.device("meta")  # META: a device to which nothing is copied


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lowlat-read")]


@pytest.fixture(params=["gpt_oss-mxfp4", "gpt_oss", "llama-tied"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "gpt_oss-mxfp4":
        mxfp4_target(tmp_path)
    else:
        make_target(tmp_path, request.param.split("-")[0], tie_word_embeddings=request.param.endswith("tied"))
    return tmp_path


@pytest.mark.parametrize(("dtype", "chunk"), [("float32", 1), ("bfloat16", 1000), ("bfloat16", 8 << 20)])
def test_a_stream_brings_what_loading_brings(
    directory: Path, dtype: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_target(directory, dtype=dtype).weights
    monkeypatch.setattr(stored, "CHUNK_BYTES", chunk)  # a row at a time, some rows, all of them
    monkeypatch.setattr(stored, "MIN_AHEAD_BYTES", 0)  # room for two: every place is used many times
    weights = open_target(directory, dtype=dtype).weights
    seen: dict[str, torch.Tensor] = {}
    arena = torch.full((weights.arena_bytes,), 0xAA, dtype=torch.uint8)
    assert weights.arena_bytes < sum(4096 + tensor.nbytes for tensor in whole.values())
    begin, end = arena.data_ptr(), arena.data_ptr() + arena.numel()
    for names, tensor in weights.stream(arena):
        assert begin <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= end
        seen.update(dict.fromkeys(names, tensor.clone()))
    assert set(seen) == set(whole) == set(weights) and len(weights) == len(whole)
    for name, tensor in whole.items():
        assert torch.equal(seen[name], tensor) and torch.equal(weights[name], tensor), name
        shape = weights.shapes()[name]
        assert (shape.shape, shape.dtype) == (tensor.shape, tensor.dtype)
    assert ("lm_head.weight" in weights) and "absent" not in weights
    assert not readers()


def test_names_of_one_tensor_come_together(tmp_path: Path) -> None:
    make_target(tmp_path, "llama", tie_word_embeddings=True)
    target = open_target(tmp_path)
    names = [names for names, _ in target.weights.stream()]
    assert ("embed.weight", "lm_head.weight") in names
    shapes = target.weights.shapes()
    assert shapes["embed.weight"] is shapes["lm_head.weight"]
    matrices = {"lm_head.weight", "layers.0.qkv.weight"}
    stream = DeviceWeights(open_target(tmp_path, dtype="bfloat16").weights, matrices, CPU)
    whole = load_target(tmp_path, dtype="bfloat16").weights
    assert stream.matrix("lm_head.weight") is stream.table("embed.weight")
    for name, tensor in whole.items():
        placed = stream.table(name)
        assert torch.equal((unpack(placed) if isinstance(placed, PackedMatrix) else placed), tensor), name


def test_blocks_are_still_there_when_their_scales_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MIN_AHEAD_BYTES", 0)
    mxfp4_target(tmp_path)
    whole = load_target(tmp_path).weights
    weights = open_target(tmp_path).weights
    previous: tuple[str, torch.Tensor] | None = None
    pairs = 0
    for (name, *_), tensor in weights.stream(torch.empty(weights.arena_bytes, dtype=torch.uint8)):
        if name.endswith(".scales"):
            assert previous is not None and previous[0] == name.replace("scales", "blocks")
            assert torch.equal(previous[1], whole[previous[0]]) and torch.equal(tensor, whole[name])
            pairs += 1
        previous = name, tensor
    assert pairs == sum(name.endswith(".scales") for name in whole) > 0


def test_joined_weights_are_one_mapping(tmp_path: Path) -> None:
    make_target(tmp_path, "llama")
    target = open_target(tmp_path)
    own = {"draft_model.a": torch.ones(3), "draft_model.b": torch.zeros(2)}
    own["draft_model.c"] = own["draft_model.a"]
    joined = JoinedWeights(target.weights, own)
    assert set(joined) == set(target.weights) | set(own) and len(joined) == len(target.weights) + 3
    assert joined["draft_model.a"] is own["draft_model.a"] and "norm.weight" in joined and "absent" not in joined
    assert torch.equal(joined["norm.weight"], load_target(tmp_path).weights["norm.weight"])
    with pytest.raises(KeyError, match="absent"):
        joined["absent"]
    assert joined.arena_bytes == target.weights.arena_bytes and JoinedWeights(own).arena_bytes == 0
    assert set(shapes_of(joined)) == set(joined) and shapes_of(own) is own
    for device in (CPU, META):
        with streamed(joined, device) as stream:
            groups = [names for names, _ in stream]
        assert ("draft_model.a", "draft_model.c") in groups and sum(map(len, groups)) == len(joined)


def test_progress_is_in_bytes_and_ends_with_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "CHUNK_BYTES", 512)
    make_target(tmp_path, "gpt_oss")
    calls: list[tuple[int, int]] = []
    with Runtime.load(tmp_path, max_batch=1, max_context=64, progress=lambda *both: calls.append(both)):
        pass
    total = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    assert calls[-1] == (total, total) and {total for _, total in calls} == {total}
    done = [done for done, _ in calls]
    assert done == sorted(set(done)) and len(done) > 100


def test_a_bad_value_ends_the_stream_and_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "CHUNK_BYTES", 256)
    make_target(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][30, 7] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"layers\.1\.mlp\.down_proj.*found nan at element {30 * 48 + 7} of 1536"):
        Runtime.load(tmp_path, max_batch=1, max_context=64)
    assert not readers()
    threads = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), streamed(open_target(tmp_path).weights, META) as stream:
        next(stream)
        assert readers()
        raise ZeroDivisionError
    assert not readers() and torch.get_num_threads() == threads


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(40, 120))
def test_places_in_the_ring_never_overlap(sizes: list[int], capacity: int) -> None:
    ring, taken, waiting = _Ring(capacity), deque[tuple[int, int]](), deque(sizes)
    while waiting or taken:
        start = ring.take(waiting[0]) if waiting else None
        if start is None:
            assert taken  # an empty ring has room for any of them
            taken.popleft()
            ring.release()
            continue
        end = start + waiting.popleft()
        assert start >= 0 and end <= capacity
        assert all(end <= begin or start >= stop for begin, stop in taken)
        taken.append((start, end))


MEGABYTE = 1 << 20
WIDTH, LAYERS, VOCAB = 1024, 12, 4096

# measures by how much the process grows at most over what its imports took; getrusage's figure would not do, because a
# process inherits it from the one that started it
GROWTH = """
import sys, torch
from pathlib import Path
from lowlat.models.target import load_target, open_target
from lowlat.lowering.device_weights import DeviceWeights
from lowlat.kernels.gemm.packing import PackedMatrix, unpack
def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
torch.ones(64, 64) @ torch.ones(64, 64)
Path("/proc/self/clear_refs").write_text("5")  # the largest size so far is forgotten
before = status("VmRSS")
if sys.argv[2] == "whole":
    kept = load_target(sys.argv[1]).weights
else:
    weights = open_target(sys.argv[1]).weights
    matrices = {name for name, tensor in weights.shapes().items() if tensor.dim() == 2}
    kept = DeviceWeights(weights, matrices, torch.device("meta"))
print(status("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A Llama of about 200 MB in a shard a layer, written one at a time; and its bytes."""
    directory = tmp_path_factory.mktemp("sharded")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "torch_dtype": "bfloat16",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    weight_map: dict[str, str] = {}
    total = 0

    def write(file: str, shapes: dict[str, tuple[int, ...]]) -> None:
        nonlocal total
        tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        save_file(tensors, directory / file)
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())

    for layer in range(LAYERS):
        own: dict[str, tuple[int, ...]] = {f"self_attn.{part}_proj": (WIDTH, WIDTH) for part in "qkvo"}
        own |= {"mlp.gate_proj": (2 * WIDTH, WIDTH), "mlp.up_proj": (2 * WIDTH, WIDTH)}
        own["mlp.down_proj"] = (WIDTH, 2 * WIDTH)
        own |= {"input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}
        write(f"model-{layer}.safetensors", {f"model.layers.{layer}.{name}.weight": own[name] for name in own})
    outer: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, WIDTH), "lm_head.weight": (VOCAB, WIDTH)}
    write("model-outer.safetensors", outer | {"model.norm.weight": (WIDTH,)})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory, total


def growth(directory: Path, how: str) -> int:
    command = [sys.executable, "-c", GROWTH, str(directory), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout)


@pytest.mark.wide
def test_host_memory_is_bounded_however_large_the_model(sharded: tuple[Path, int]) -> None:
    directory, total = sharded
    assert total > 200 * MEGABYTE
    bound = open_target(directory).weights.arena_bytes + 50 * MEGABYTE  # readers' pieces, threads, allocator
    assert bound < total / 1.5
    assert 0.5 * bound < growth(directory, "stream") < bound
    assert growth(directory, "whole") > 0.95 * total > bound  # the bound says something


@pytest.mark.second
def test_the_arena_holds_two_of_the_largest(sharded: tuple[Path, int]) -> None:
    weights = open_target(sharded[0]).weights
    assert isinstance(weights, StoredWeights)
    largest = max(tensor.nbytes for tensor in weights.shapes().values())
    assert weights.arena_bytes == max(2 * largest, stored.MIN_AHEAD_BYTES) == 64 * MEGABYTE
