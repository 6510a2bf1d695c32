"""This module makes `Runtime.numerics`, a digest of all facts that decide the bits of a runtime's results.

Two runtimes of one model whose digests are equal give equal tokens for equal prompts, seeds and sampling. The digest
leaves out weights, which the model's name and files identify. It also leaves out what changes no bit: buckets, the
method and draft length of speculation, fusion, plans of tuning tables, and how many chunks of prefill run at once.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lowlat.engine.loading.loaded import Loaded
from lowlat.models.shard import PARTS
from lowlat.options.runtime import RuntimeConfig

__all__ = ["digest_of", "numerics_of"]

DIGITS = 16
# folders of the package whose code makes, lowers and runs a step, or decides what its weights are
SOURCES = ("checkpoint", "executors", "kernels", "lowering", "models", "sequence", "step")
# facts of a target that decide no bit: ends and lengths of texts, and a rank's part, which `ranks` stands for
NOT_OF_NUMERICS = ("eos_token_ids", "bos_token_id", "max_position", "shard")


def numerics_of(loaded: Loaded, config: RuntimeConfig) -> dict[str, Any]:
    """All facts that decide the bits of a runtime's results, by name.

    code        digest of the sources in SOURCES; versions of torch and, if kernels run, of their compilers
    executor    "reference", or "kernels": eager, captured and looping steps have the same bits
    device      its class: the CUDA capability, or the CPU's vector instructions; not its name
    target      the target's geometry: sizes, layers, the compute dtype, weight formats and KV format with its scales
    chunk       positions of a chunk of prefill
    splits      positions of a split of attention, which depends on the sizes that a runtime is loaded with
    k_parts     parts in which K is summed, whatever the number of ranks; None: each rank sums its own columns
    ranks       their number; None if it changes no bit
    inexact     options that change results beyond rounding: sizes of lossy SpecPV, simulated acceptance, and sharing
                of KV that decoding wrote
    """
    geometry, choice = loaded.geometry, loaded.choice
    partial = geometry.partial
    inexact = {
        "specpv": None if partial is None or partial.lossless else partial,
        "acceptance": None if geometry.simulated_acceptance is None
        else (geometry.simulated_acceptance, geometry.simulated_seed),
        "share_decoded": config.prefix_reuse and config.share_decoded,
    }  # fmt: skip
    return {
        "code": (_source_digest(), torch.__version__, _compilers() if choice.has_kernels else ()),
        "executor": "kernels" if choice.has_kernels else "reference",
        "device": _device_class(choice.device),
        "target": {
            name: value for name, value in _fields_of(loaded.target.config).items() if name not in NOT_OF_NUMERICS
        },
        "chunk": geometry.prefill_chunk,
        "splits": _splits(loaded, config) if choice.has_kernels else None,
        "k_parts": PARTS if config.tp_invariant else None,
        "ranks": None if config.tp_invariant else config.tensor_parallel_size,
        "inexact": inexact,
    }


def digest_of(facts: Mapping[str, Any]) -> str:
    """Digest facts to 16 hexadecimal digits, the same in every process and version of Python."""
    return hashlib.sha256(repr(_plain(facts)).encode()).hexdigest()[:DIGITS]


@cache
def _source_digest() -> str:
    digest, package = hashlib.sha256(), Path(__file__).resolve().parents[1]
    for folder in SOURCES:
        root = package / folder
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{folder}/{path.relative_to(root).as_posix()}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _compilers() -> tuple[str, ...]:
    from lowlat.kernels.toolchain.digests import assembler, compilers  # of machines with a GPU

    return (*compilers(), assembler(), str(torch.version.cuda))


def _device_class(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"cuda {major}.{minor}"
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"


def _splits(loaded: Loaded, config: RuntimeConfig) -> list[int]:
    """The positions of a split of attention, for each layer that has attention."""
    from lowlat.kernels.attention.limits import (
        INVARIANT_HEADS,  # of machines with a GPU
        choose_split,
    )

    heads = {
        (INVARIANT_HEADS if config.tp_invariant else spec.num_kv_heads, spec.head_dim)
        for spec in loaded.rank_config.attentions.values()
    }
    geometry = loaded.geometry
    return [choose_split(geometry.max_batch, geometry.max_context, *each) for each in sorted(heads)]


def _fields_of(record: Any) -> dict[str, Any]:
    return {each.name: getattr(record, each.name) for each in fields(record)}


def _plain(value: Any) -> Any:
    """Turn a value into tuples of names and plain values, in a canonical order."""
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, _plain(_fields_of(value))
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), repr(_plain(each))) for key, each in value.items()))
    if isinstance(value, set | frozenset):
        return tuple(sorted(repr(_plain(each)) for each in value))
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, torch.dtype | Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be digested")
