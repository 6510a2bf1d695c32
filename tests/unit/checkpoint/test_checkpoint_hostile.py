"""Weight files and JSON that lie: each ends in a ConfigError naming file, tensor, expected and found."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_files import edit_json, read_header_bytes, write_raw
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import make_target

from lowlat.checkpoint.json_file import parse_object
from lowlat.checkpoint.tensors import Checkpoint, read_header
from lowlat.errors import ConfigError
from lowlat.models.target import load_target, open_target, read_model_config

Tensors = dict[str, torch.Tensor]
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound checkpoint; tests work on copies."""
    directory = tmp_path_factory.mktemp("llama")
    make_target(directory, "llama")
    return directory


@pytest.fixture
def directory(llama: Path, tmp_path: Path) -> Path:
    """A fresh copy of the sound checkpoint."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


def refused(directory: Path, *parts: str) -> None:
    """Loading fails with a message that holds every part."""
    with pytest.raises(ConfigError) as caught:
        load_target(directory)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def rewrite(directory: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


EXTRA = {"model.layers.3.self_attn.q_proj.weight": torch.ones(2, 3), "zzz": torch.ones(1)}


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda tensors: tensors.pop(DOWN), (DOWN, "is missing; expected shape [32, 48]")),
        (
            lambda tensors: tensors.update(EXTRA),
            ("model.safetensors: unexpected tensor 'model.layers.3.self_attn.q_proj.weight'", "2 such"),
        ),
        (
            lambda tensors: tensors.update({DOWN: torch.ones(48, 32)}),
            ("model.safetensors", DOWN, "expected shape [32, 48], found [48, 32]"),
        ),
        (
            lambda tensors: tensors.update({DOWN: torch.ones(32, 48, dtype=torch.int64)}),
            ("model.safetensors", DOWN, "expected dtype BF16 or F16 or F32, found I64"),
        ),
        (
            lambda tensors: tensors.update({DOWN: torch.ones(32, 48, dtype=torch.float64)}),
            ("model.safetensors", DOWN, "dtype 'F64' is not one of BF16, F16, F32"),
        ),
    ],
)
def test_tensors_that_do_not_belong(change: Callable[[Tensors], object], parts: list[str], directory: Path) -> None:
    rewrite(directory, change)
    refused(directory, str(directory), *parts)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite(value: float, directory: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.k_proj.weight"][3, 5] = value

    rewrite(directory, spoil)
    refused(
        directory,
        "model.safetensors: tensor 'model.layers.0.self_attn.k_proj.weight': expected finite values",
        f"found {value} at element {3 * 32 + 5} of 512",
    )


def test_values_that_the_compute_dtype_cannot_hold(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors["model.norm.weight"].fill_(3.4e38))
    load_target(directory, dtype="float32")
    with pytest.raises(ConfigError, match=r"stored as F32, read as torch\.bfloat16.*found inf at element 0"):
        load_target(directory, dtype="bfloat16")


@pytest.mark.parametrize("kept", [0, 5, 8, 300, -1])
def test_truncated_file(kept: int, directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refused(directory, str(path), "truncated")


def test_padded_file(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0" * 64)
    refused(directory, str(path), "truncated or padded")


@pytest.mark.parametrize("length", [0, 1, 1 << 20, (1 << 64) - 1, -1])
def test_header_length_that_lies(length: int, directory: Path) -> None:
    path = directory / "model.safetensors"
    header, data = read_header_bytes(path)
    write_raw(path, header, data, length=length if length >= 0 else len(header) - 1)
    refused(directory, str(path))


def test_duplicate_tensor_in_the_header(directory: Path) -> None:
    path = directory / "model.safetensors"
    header, data = read_header_bytes(path)
    entry = re.search(rb'"model\.norm\.weight":\{.*?\}', header)
    assert entry is not None
    write_raw(path, header.rstrip().removesuffix(b"}") + b"," + entry.group() + b"}", data)
    refused(directory, str(path), "'model.norm.weight' stands twice")


GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[1]", "expected a JSON object, found list"),
        (b"{", "not JSON"),
        (b"\xff{}", "not UTF-8"),
        (b'{"a": 1}', "expected dtype, shape and data_offsets, found 1"),
        (json.dumps({"a": {**GOOD, "extra": 1}}).encode(), "expected dtype, shape and data_offsets"),
        (json.dumps({"a": {**GOOD, "dtype": "F128"}}).encode(), "dtype 'F128' is not one of"),
        (json.dumps({"a": {**GOOD, "dtype": ["F32"]}}).encode(), "dtype ['F32'] is not one of"),
        (json.dumps({"a": {**GOOD, "shape": [2, -2]}}).encode(), "shape [2, -2]"),
        (json.dumps({"a": {**GOOD, "shape": [True, 4]}}).encode(), "shape [True, 4]"),
        (json.dumps({"a": {**GOOD, "shape": [2.0, 2]}}).encode(), "shape [2.0, 2]"),
        (json.dumps({"a": {**GOOD, "shape": [1] * 9}}).encode(), "at most 8 sizes"),
        (json.dumps({"a": {**GOOD, "shape": [1 << 39, 1 << 39]}}).encode(), "expected 12089258196146291747061"),
        (json.dumps({"a": {**GOOD, "shape": [3, 2]}}).encode(), "expected 24 bytes for F32 [3, 2]"),
        (json.dumps({"a": {**GOOD, "data_offsets": [16, 0]}}).encode(), "expected 16 bytes"),
        (json.dumps({"a": {**GOOD, "data_offsets": [0]}}).encode(), "not a pair of offsets"),
        (json.dumps({"a": GOOD, "b": GOOD}).encode(), "tensor 'b' begins at byte 0, expected 16"),
        (json.dumps({"a": {**GOOD, "data_offsets": [4, 20]}}).encode(), "begins at byte 4, expected 0"),
        (json.dumps({"a": {**GOOD, "shape": [1, 2], "data_offsets": [0, 8]}}).encode(), "declares 8 bytes"),
        (b'{"a": ' + b"[" * 100000 + b"]" * 100000 + b"}", "nested deeper than 32 levels"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number that cannot be used"),
    ],
)
def test_headers_that_lie(header: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_raw(path, header, bytes(16))
    with pytest.raises(ConfigError) as caught:
        read_header(path)
    assert str(path) in str(caught.value) and message in str(caught.value)


@given(st.binary(max_size=200), st.integers(0, 300))
def test_random_bytes_are_never_a_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, length: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + data)
    try:
        entries = read_header(path)
    except ConfigError:
        return
    assert sum(entry.num_bytes for entry in entries.values()) == len(data) - length


def test_file_that_changes_after_its_header_was_read(directory: Path) -> None:
    path = directory / "model.safetensors"
    original = path.read_bytes()
    changes = {
        "shorter": original[:-100],
        "much shorter": original[:200],
        "same size": original[:-1] + bytes([original[-1] ^ 1]),
    }
    for name, data in changes.items():
        path.write_bytes(original)
        os.utime(path, ns=(1, 1))  # clocks of file systems are coarse
        checkpoint = Checkpoint.open(directory)
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=r"tensor 'model\.norm\.weight' changed while it was read"):
            list(checkpoint.read(["model.norm.weight"]))
        target = open_target(directory) if name == "same size" else None
        if target is not None:
            path.write_bytes(original)
            with pytest.raises(ConfigError, match="changed while it was read"):
                list(target.weights.stream())
    path.unlink()
    with pytest.raises(ConfigError, match=r"tensor 'model\.norm\.weight' cannot be read"):
        list(checkpoint.read(["model.norm.weight"]))


def test_weights_that_are_not_there(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    refused(directory, str(directory), "expected model.safetensors or model.safetensors.index.json, found neither")
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04")
    refused(directory, "pytorch_model.bin", "pickles are never read")


def test_weights_that_are_not_a_file(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    os.mkfifo(directory / "model.safetensors")  # opening it would block for ever
    refused(directory, "model.safetensors: no such file")


def index(directory: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Turn the single file into one shard with an index, changed."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").rename(directory / "model-00001-of-00001.safetensors")
    weight_map: dict[str, object] = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    change(weight_map)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..\\x.safetensors", "..", "x.bin", 3, None, ["x"]],
)
def test_index_that_leaves_the_directory(file: object, directory: Path) -> None:
    save_file({"x": torch.ones(1)}, directory.parent / "x.safetensors")
    index(directory, lambda weight_map: weight_map.update({DOWN: file}))
    refused(directory, "index.json", DOWN, "a .safetensors file in the same directory", f"found {file!r}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weight_map: weight_map.update({DOWN: "model-2.safetensors"}), "model-2.safetensors: no such file"),
        (
            lambda weight_map: weight_map.update({"ghost": "model-00001-of-00001.safetensors"}),
            "index.json: tensor 'ghost' is not in model-00001-of-00001.safetensors",
        ),
        (lambda weight_map: weight_map.pop(DOWN), f"holds tensor '{DOWN}', which the index does not put there"),
    ],
)
def test_index_that_lies(change: Callable[[dict[str, object]], object], message: str, directory: Path) -> None:
    index(directory, change)
    refused(directory, str(directory), message)


@pytest.mark.parametrize("text", ['{"weight_map": []}', '{"weight_map": {}}', "{}", '{"weight_map": "x"}'])
def test_index_without_a_map(text: str, directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(text)
    refused(directory, "index.json: weight_map must be an object")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON at line 1 column 1"),
        (b"{'a': 1}", "not JSON"),
        (b"[]", "expected a JSON object, found list"),
        (b'"text"', "expected a JSON object, found str"),
        (b"\x80abc", "not UTF-8 at byte 0"),
        (b'{"a": NaN}', "a number that cannot be used"),
        (b'{"a": -Infinity}', "a number that cannot be used"),
        (b'{"a": ' + b"1" * 10000 + b"}", "a number that cannot be used"),
        (b'{"a": {"b": 1, "b": 2}}', "the key 'b' stands twice in one object"),
        (b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}", "nested deeper than 32 levels"),
        (b'{"a":' * 200000 + b"1" + b"}" * 200000, "nested deeper than 32 levels"),
    ],
)
def test_json_that_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {re.escape(message)}"):
        parse_object(data, "config.json")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_malformed_files_are_named(name: str, directory: Path) -> None:
    (directory / name).write_text('{"a": 1,}')
    refused(directory, str(directory / name), "not JSON")


def test_a_missing_directory_and_a_missing_config(directory: Path) -> None:
    refused(directory / "nowhere", "nowhere: no such directory")
    (directory / "config.json").unlink()
    refused(directory, str(directory / "config.json"), "no such file")


def test_an_enormous_config_is_not_read(directory: Path) -> None:
    with (directory / "config.json").open("wb") as stream:
        stream.truncate(17 << 20)
    refused(directory, "config.json: is larger than 16777216 bytes")


def test_sizes_are_checked_before_anything_is_allocated(directory: Path) -> None:
    """A config that asks for terabytes fails on the first shape, at once."""
    edit_json(directory / "config.json", intermediate_size=1 << 20, vocab_size=1 << 24)
    assert read_model_config(directory).vocab_size == 1 << 24
    refused(directory, "model.embed_tokens.weight", "expected shape [16777216, 32], found [97, 32]")
