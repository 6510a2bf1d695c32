"""This module reads safetensors directories as untrusted input: one file or shards, headers checked first.

It handles names, dtypes, shapes and bytes, and knows nothing of models. It reads no other format: pickles run code.
"""

import math
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch

from lowlat.checkpoint.foreign import foreign_directory
from lowlat.checkpoint.json_file import parse_object, read_object, shown
from lowlat.errors import ConfigError

__all__ = [
    "DTYPES",
    "FLOAT_NAMES",
    "INDEX_FILE",
    "QUANTISATION_FILE",
    "SINGLE_FILE",
    "Checkpoint",
    "OpenFiles",
    "TensorEntry",
    "check_finite",
    "read_header",
    "stored_names",
]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
QUANTISATION_FILE = "hf_quant_config.json"  # ModelOpt's, beside config.json
MAX_HEADER_BYTES = 100 << 20
MAX_DIMENSIONS = 8
MAX_EXTENT = 1 << 40

# safetensors' dtypes that lowlat reads -> torch's
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "U8": torch.uint8,
    "F8_E4M3": torch.uint8,  # as bits
    "BOOL": torch.bool,
    "I32": torch.int32,
    "I64": torch.int64,
}
FLOAT_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True)
class TensorEntry:
    """The place of a tensor in its file, by the header, which was checked against the file's size."""

    name: str
    file: Path
    dtype: str  # the format's name, "BF16"
    shape: tuple[int, ...]
    num_bytes: int
    offset: int  # of its first byte in the file
    stamp: tuple[int, int]  # the file's bytes and modification time in ns when its header was read

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension; of the whole tensor if it has no dimensions."""
        return self.num_bytes // max(1, self.shape[0]) if self.shape else self.num_bytes


def check_finite(tensor: torch.Tensor, label: str, *, first: int = 0, total: int | None = None) -> None:
    """Raise ConfigError with the first element that is NaN or infinite; it makes no copy of the tensor.

    first, total  the tensor's first element in a larger one, and the number of elements of that, for the message
    """
    if not tensor.numel():
        return
    # aminmax is one pass, and any NaN makes both bounds NaN; isfinite ran at a fortieth of its speed
    if all(math.isfinite(float(bound)) for bound in torch.aminmax(tensor)):
        return
    flat = tensor.reshape(-1)
    at = int((~torch.isfinite(flat)).nonzero()[0])
    raise ConfigError(
        f"{label}: expected finite values, found {float(flat[at])} at element {first + at} of {total or flat.numel()}"
    )


def _non_negative(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_EXTENT


def _entry(name: str, value: Any, file: Path, base: int, stamp: tuple[int, int]) -> TensorEntry:
    """Read the entry of a tensor in a file whose tensors begin at byte `base`."""
    label = f"{file}: header of tensor {shown(name)}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ConfigError(f"{label}: expected dtype, shape and data_offsets, found {shown(value)}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ConfigError(f"{label}: dtype {shown(dtype)} is not one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_non_negative, shape)):
        raise ConfigError(f"{label}: shape {shown(shape)} is not a list of at most {MAX_DIMENSIONS} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_non_negative, offsets)):
        raise ConfigError(f"{label}: data_offsets {shown(offsets)} is not a pair of offsets")
    num_bytes = DTYPES[dtype].itemsize
    for size in shape:
        num_bytes *= size
    if offsets[1] - offsets[0] != num_bytes:
        raise ConfigError(
            f"{label}: expected {num_bytes} bytes for {dtype} {shown(shape)}, found data_offsets {offsets}"
        )
    return TensorEntry(name, file, dtype, tuple(shape), num_bytes, base + offsets[0], stamp)


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Read the entries of a safetensors file, in file order, and check that their byte ranges tile the file.

    Raises ConfigError for a file that is too short, a wrong header length, a header that is not JSON, duplicate keys,
    unknown dtypes, and ranges that overlap, leave gaps, or disagree with the shapes.
    """
    try:
        if not file.is_file():
            raise ConfigError(f"{file}: no such file")
        with file.open("rb") as stream:
            stamp = _stamp(stream.fileno())
            size = stamp[0]
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise ConfigError(
                    f"{file}: expected a header of at most {max(0, min(size - 8, MAX_HEADER_BYTES))} bytes in a file "
                    f"of {size}, found the length {length}: not safetensors, or truncated"
                )
            data = stream.read(length)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read") from error
    header = parse_object(data, f"{file}: header")
    header.pop("__metadata__", None)
    base = 8 + length
    entries = [_entry(name, value, file, base, stamp) for name, value in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.num_bytes))
    end = 0
    for entry in entries:
        if entry.offset - base != end:
            raise ConfigError(
                f"{file}: tensor {shown(entry.name)} begins at byte {entry.offset - base}, expected {end}"
            )
        end += entry.num_bytes
    if end != size - base:
        raise ConfigError(
            f"{file}: the header declares {end} bytes of tensors, found {size - base}: truncated or padded"
        )
    return {entry.name: entry for entry in entries}


def _stamp(descriptor: int) -> tuple[int, int]:
    """Return size and modification time, by which a changed file is noticed."""
    found = os.fstat(descriptor)
    return found.st_size, found.st_mtime_ns


class OpenFiles:
    """Files that are opened once each, and that any number of threads read into the caller's memory.

    It uses pread, not mmap: with mmap a file that is truncated while it is read kills the process, and memory is filled
    a page at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptors: dict[Path, int] = {}

    def read(self, entry: TensorEntry, out: torch.Tensor, *, first: int = 0) -> None:
        """Fill `out`, contiguous on the CPU, with the tensor's bytes from its row `first` on.

        Raises ConfigError when the file cannot be read or is not the one whose header was read.
        """
        view = memoryview(out.reshape(-1).view(torch.uint8).numpy().data)
        at = entry.offset + first * entry.row_bytes
        changed = f"{entry.file}: tensor {entry.name!r} changed while it was read"
        try:
            descriptor = self._descriptor(entry.file)
            while view:
                count = os.preadv(descriptor, [view], at)
                if count == 0:
                    raise ConfigError(f"{changed}: it ends at byte {at}")
                view, at = view[count:], at + count
            stamp = _stamp(descriptor)
        except OSError as error:
            raise ConfigError(f"{entry.file}: tensor {entry.name!r} cannot be read") from error
        if stamp != entry.stamp:
            raise ConfigError(changed)

    def expect(self, entry: TensorEntry) -> None:
        """Ask the system to read a tensor ahead; this is a hint, which may do nothing."""
        try:
            os.posix_fadvise(self._descriptor(entry.file), entry.offset, entry.num_bytes, os.POSIX_FADV_WILLNEED)
        except OSError:
            return  # `read` will report the error

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            return self._descriptors[file]

    def close(self) -> None:
        """Close every file; harmless when repeated."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Checkpoint:
    """The tensors of a model directory by name, which are read one at a time.

    A directory has either model.safetensors, which wins as it does in transformers, or
    model.safetensors.index.json with shards next to it. Shards may be symbolic links, as in the hub's cache, but
    the index may only name files, not paths.
    """

    def __init__(self, directory: Path, entries: Mapping[str, TensorEntry]) -> None:
        self.directory = directory
        self.entries = MappingProxyType(dict(entries))

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        """Read and check all headers; no tensor is read. Raises ConfigError."""
        single, index = directory / SINGLE_FILE, directory / INDEX_FILE
        if single.exists():
            return cls(directory, read_header(single))
        if index.exists():
            return cls(directory, _read_index(index))
        why = foreign_directory(directory)
        raise ConfigError(
            f"{directory}: expected {SINGLE_FILE} or {INDEX_FILE}, found neither{f': {why}' if why else ''}"
        )

    def main_dtype(self) -> tuple[str, str]:
        """Return the dtype of the largest floating-point tensor, and its file."""
        floats = [entry for entry in self.entries.values() if entry.dtype in FLOAT_NAMES]
        if not floats:
            raise ConfigError(f"{self.directory}: expected floating-point tensors, found none")
        largest = max(floats, key=lambda entry: entry.num_bytes)
        return FLOAT_NAMES[largest.dtype], str(largest.file)

    def read(self, names: list[str]) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Read tensors in the order of names, each as stored, on the CPU; a file is opened once.

        Raises ConfigError when a file changed since its header was read.
        """
        with OpenFiles() as files:
            for name in names:
                entry = self.entries[name]
                tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
                files.read(entry, tensor)
                yield entry, tensor


def stored_names(directory: Path) -> Collection[str] | None:
    """Read the names of a directory's tensors from the header of its file or from its index; None if it has neither.

    Files that an index names need not exist. Raises ConfigError.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.exists():
        return read_header(single)
    return _weight_map(index) if index.exists() else None


def _weight_map(index: Path) -> dict[str, Any]:
    weight_map = read_object(index, max_bytes=MAX_HEADER_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: weight_map must be an object that names tensors, found {shown(weight_map)}")
    return weight_map


def _read_index(index: Path) -> dict[str, TensorEntry]:
    weight_map = _weight_map(index)
    files: dict[str, dict[str, TensorEntry]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or set(file) & set("/\\\0"):
            raise ConfigError(
                f"{index}: tensor {shown(name)} must name a .safetensors file in the same directory, "
                f"found {shown(file)}"
            )
        if file not in files:
            files[file] = read_header(index.parent / file)
        if name not in files[file]:
            raise ConfigError(f"{index}: tensor {shown(name)} is not in {file}, where the index puts it")
    for file, entries in files.items():
        for name in entries:
            if weight_map.get(name) != file:
                raise ConfigError(f"{index}: {file} holds tensor {shown(name)}, which the index does not put there")
    return {name: files[file][name] for name, file in weight_map.items()}
