"""How fast weights go from their files to a device, and how much of the host's memory that takes.

    python -m bench.load --layers 10                 random weights of gpt-oss-20b's shape, 10 of its 24 layers
    python -m bench.load --shape 120b --part 4       all 36 layers, written, timed and deleted four at a time
    python -m bench.load --shape 120b --part 4 --runs warm    the same from the page cache alone
    python -m bench.load --directory DIR             a model that is there

Weights are streamed as a runtime streams them: to the NVIDIA card where there is one, elsewhere to a device without
memory, which leaves reading, arranging and checking, and the first touch of the memory between. There are two runs:
`cold`, after the files were dropped from the page cache (as far as the system lets a process do that), and `warm`, from
it. Beside each stands how fast one thread then reads the same files into a small buffer, which is the speed of the disk
or the page cache. Each part is reported on stderr as it ends. The program adds one object to the list in --out, or
prints it.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.conditions import stamps_of, write_json
from lowlat.checkpoint.recipes import Recipe
from lowlat.lowering.device_weights import DeviceWeights
from lowlat.models.target import open_target, read_model_config, target_recipes

__all__ = ["measure", "write_model"]

COMMON = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4"},
}
SHAPES: dict[str, dict[str, int]] = {
    "20b": {"num_hidden_layers": 24, "num_local_experts": 32},
    "120b": {"num_hidden_layers": 36, "num_local_experts": 128},
    "tiny": {
        "num_hidden_layers": 2, "num_local_experts": 4, "hidden_size": 64, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    },
}  # fmt: skip
NOISE = 1 << 22
READ_BYTES = 16 << 20
RUNS = ("cold", "warm")


def write_model(directory: Path, shape: str, layers: int) -> None:
    """Write random weights, a shard a layer and one for the rest; one shard at a time is in memory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {**COMMON, **SHAPES[shape], "num_hidden_layers": layers}
    (directory / "config.json").write_text(json.dumps(config))
    by_shard: dict[str, list[Recipe]] = {}
    for recipe in target_recipes(read_model_config(directory)):
        parts = recipe.weight.split(".")
        shard = f"model-{parts[1] if parts[0] == 'layers' else 'outer'}.safetensors"
        by_shard.setdefault(shard, []).append(recipe)
    generator = torch.Generator().manual_seed(0)
    weight_map = {}
    for shard, recipes in by_shard.items():
        tensors = {p.name: _random(r, p.shape, generator) for r in recipes for p in r.pieces}
        save_file(tensors, directory / shard)
        weight_map.update(dict.fromkeys(tensors, shard))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _random(recipe: Recipe, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Noise, the same few megabytes over and over; MXFP4 scales near one."""
    count = torch.Size(shape).numel()
    size = min(count, NOISE)
    if recipe.weight.endswith(".scales"):
        noise = torch.randint(115, 125, (size,), dtype=torch.uint8, generator=generator)
    elif recipe.dtype == torch.uint8:
        noise = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    else:
        noise = torch.randn(size, generator=generator).to(torch.bfloat16)
    return noise.repeat(-(-count // size))[:count].view(shape)


def measure(directory: Path, device: torch.device, *, cold: bool) -> dict[str, Any]:
    """Stream a model to a device once: bytes, seconds, GB/s, and by how much the process grew at most."""
    if cold:
        _forget(directory)
    target = open_target(directory)
    shapes = target.weights.shapes()
    matrices = {name for name, tensor in shapes.items() if tensor.dim() == 2 and tensor.is_floating_point()}
    total = sum(entry.num_bytes for entry in target.weights.checkpoint.entries.values())
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the largest size so far is forgotten
    before = _status("VmRSS")
    start = time.perf_counter()
    placed = DeviceWeights(target.weights, matrices - {"embed.weight"}, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    placed.clear()
    if cold:
        _forget(directory)
    plain = _read(directory)
    return {
        "bytes": total,
        "seconds": seconds,
        "gb_per_s": total / seconds / 1e9,
        "read_seconds": plain,
        "host_peak_bytes": _status("VmHWM") - before,
        "host_load_bytes": target.weights.arena_bytes,
    }


def _forget(directory: Path) -> None:
    """Drop the files' clean pages from the page cache."""
    for file in directory.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _read(directory: Path) -> float:
    """Seconds to read the model's files, one after the other, into one buffer."""
    room = bytearray(READ_BYTES)
    start = time.perf_counter()
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(room):
                pass
    return time.perf_counter() - start


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def _summed(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Parts of one model, loaded one after the other, as if it were one."""
    total, seconds, read = (sum(part[name] for part in parts) for name in ("bytes", "seconds", "read_seconds"))
    peaks = {name: max(part[name] for part in parts) for name in ("host_peak_bytes", "host_load_bytes")}
    speeds = {"gb_per_s": total / seconds / 1e9, "read_gb_per_s": total / read / 1e9}
    return {"bytes": total, "seconds": seconds, **speeds, **peaks}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write or print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="a model that is there; nothing is written")
    parser.add_argument("--shape", choices=SHAPES, default="20b")
    parser.add_argument("--layers", type=int, help="layers in all; the shape's own by default")
    parser.add_argument("--part", type=int, help="layers on disk at a time; all by default")
    parser.add_argument("--scratch", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--runs", choices=RUNS, nargs="+", default=RUNS, help="both by default")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--out", type=Path, help="JSON file to add to")
    options = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("meta")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in RUNS if name in options.runs}

    def run(directory: Path) -> None:
        for name, found in runs.items():
            found.append(measure(directory, device, cold=name == "cold"))
            print(f"{name}: {found[-1]['bytes'] / 1e9:.1f} GB at {found[-1]['gb_per_s']:.2f} GB/s", file=sys.stderr)

    if options.directory is not None:
        run(options.directory)
        what = {"model": options.directory.name}
    else:
        layers = options.layers or SHAPES[options.shape]["num_hidden_layers"]
        for first in range(0, layers, options.part or layers):
            scratch = Path(tempfile.mkdtemp(prefix="lowlat-load-", dir=options.scratch))
            try:
                write_model(scratch, options.shape, min(options.part or layers, layers - first))
                run(scratch)
            finally:
                shutil.rmtree(scratch)
        what = {"shape": options.shape, "layers": layers, "part": options.part, "simulated": "random weights"}
    result = {
        **stamps_of(device, options.commit),
        "to": "device" if device.type == "cuda" else "nowhere",
        "cores": len(os.sched_getaffinity(0)),
        **what,
        **{name: _summed(found) for name, found in runs.items()},
    }
    if options.out is None:
        print(json.dumps(result))
        return
    known = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else []
    write_json(options.out, [*known, result])


if __name__ == "__main__":
    main()
