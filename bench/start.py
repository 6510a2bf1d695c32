"""This program times a start, from a new process to the first token: Llama-3.1-8B's shape with its draft model.

    python -m bench.start --directory /tmp/checkpoint --out bench/results/h200/start.json

Random weights are written to the directory once (17 GB; `--tiny` a few kilobytes), by the public names of both
formats. Then processes load them, each with an empty kernel cache or with the one that the run before filled:
`import_s` from the start of the process, `read_s` from there until the last byte of the weights was read (from the page
cache, where it has room), `prepare_s` until the first captured graph (placing and packing weights, lowering,
compiling), `capture_s` until the last one. `ready_s` is from the start of the process until a request could be
submitted, `first_token_s` until a request with a prompt of 16 tokens had its first token.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.lib.conditions import bench_parser, stamps_of, write_json
from bench.lib.model import Model
from bench.lib.weights import RandomParts
from lowlat.models.layer_spec import AttentionSpec
from lowlat.tools.draft_model.random_models import write_draft_model

__all__ = ["main", "start_once", "write_checkpoint"]

LAYERS_A_SHARD = 8
DEPTH = 3


def write_checkpoint(model: Model, directory: Path, device: torch.device) -> tuple[Path, Path]:
    """Write a random target and its head in the layouts of Hugging Face and SpecForge; return their directories."""
    parts = RandomParts(model.plan(drafts=False), model.config, device)
    weights = {name: tensor for names, tensor in parts.stream() for name in names}
    target, head = directory / "target", directory / "head"
    target.mkdir(parents=True, exist_ok=True)
    outer = {"model.embed_tokens.weight": "embed.weight", "model.norm.weight": "norm.weight"}
    _save({name: weights[own] for name, own in (outer | {"lm_head.weight": "lm_head.weight"}).items()}, target, 0)
    mixers = model.config.attentions
    for start in range(0, len(mixers), LAYERS_A_SHARD):
        shard: dict[str, torch.Tensor] = {}
        for layer in range(start, min(start + LAYERS_A_SHARD, len(mixers))):
            shard |= _layer(mixers[layer], weights, f"layers.{layer}", f"model.layers.{layer}")
        _save(shard, target, 1 + start // LAYERS_A_SHARD)
    _index(target)
    (target / "config.json").write_text(json.dumps(model.geometry.target))
    return target, write_draft_model(model.geometry, model.config, head)


def _layer(mixer: AttentionSpec, weights: Mapping[str, torch.Tensor], own: str, name: str) -> dict[str, Any]:
    q, k, v = weights[f"{own}.qkv.weight"].split((mixer.query_size, mixer.kv_size, mixer.kv_size))
    gate, up = weights[f"{own}.gate_up.weight"].chunk(2)
    return {
        f"{name}.input_layernorm.weight": weights[f"{own}.attn_norm.weight"],
        f"{name}.self_attn.q_proj.weight": q,
        f"{name}.self_attn.k_proj.weight": k,
        f"{name}.self_attn.v_proj.weight": v,
        f"{name}.self_attn.o_proj.weight": weights[f"{own}.o.weight"],
        f"{name}.post_attention_layernorm.weight": weights[f"{own}.ffn_norm.weight"],
        f"{name}.mlp.gate_proj.weight": gate,
        f"{name}.mlp.up_proj.weight": up,
        f"{name}.mlp.down_proj.weight": weights[f"{own}.down.weight"],
    }


def _save(tensors: Mapping[str, torch.Tensor], directory: Path, number: int) -> None:
    cpu = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(cpu, directory / f"model-{number:05d}.safetensors", metadata={"format": "pt"})


def _index(directory: Path) -> None:
    """The index that names each tensor's shard."""
    from safetensors import safe_open

    where = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            where.update(dict.fromkeys(file.keys(), path.name))
    text = json.dumps({"metadata": {}, "weight_map": where})
    (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def start_once(target: Path, head: Path, options: Mapping[str, Any], born: float) -> dict[str, Any]:
    """Load and decode one token in this process; `born` is the time.time() at which it was started."""
    from lowlat import Runtime, SamplingParams, SpeculativeConfig

    imported = time.time()
    marks: dict[str, float] = {}
    graphs = [0]

    def progress(done: int, total: int) -> None:
        if done == total:
            marks["read"] = time.time()

    def captured(done: int, total: int) -> None:
        marks.setdefault("first", time.time())
        marks["last"], graphs[0] = time.time(), total

    config = SpeculativeConfig(model=head, num_speculative_tokens=DEPTH, strict=True)
    with Runtime.load(target, config, progress=progress, captured=captured, **options) as runtime:
        ready = time.time()
        runtime.submit(list(range(16)), SamplingParams(max_tokens=4, ignore_eos=True))
        while not any(output.token_ids for output in runtime.step()):
            pass
        first = time.time()
        while runtime.busy:
            runtime.step()
    last = marks.get("last", ready)
    return {
        "import_s": round(imported - born, 3),
        "read_s": round(marks["read"] - imported, 3),
        "prepare_s": round(marks.get("first", last) - marks["read"], 3),
        "capture_s": round(last - marks.get("first", last), 3),
        "ready_s": round(ready - born, 3),
        "first_token_s": round(first - born, 3),
        "num_graphs": graphs[0],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the checkpoint where it is missing, start processes, print their rows and write them."""
    parser = bench_parser(__doc__, must_write=False)
    parser.add_argument("--directory", type=Path, required=True, help="where the checkpoint is, or is written")
    parser.add_argument("--tiny", action="store_true", help="a tiny geometry: its figures mean nothing")
    parser.add_argument("--warm", type=int, default=2, help="starts with kernels cached")
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--max-context", type=int, default=8192)
    parser.add_argument("--start", type=float, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    target, head = options.directory / "target", options.directory / "head"
    loading = {"device": options.device, "max_batch": options.max_batch, "max_context": options.max_context}
    if options.start is not None:
        print(json.dumps(start_once(target, head, loading, options.start)))
        return
    model = Model("tiny" if options.tiny else "llama-8b")
    if not (head / "config.json").is_file():
        write_checkpoint(model, options.directory, torch.device(options.device))
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for number in range(1 + options.warm):
            row = {"kernels": "cached" if number else "compiled", **_run(options, cache)}
            print(json.dumps(row), flush=True)
            rows.append(row)
    if options.out is not None:
        size = sum(path.stat().st_size for path in options.directory.rglob("*.safetensors"))
        stamps = stamps_of(torch.device(options.device), options.commit)
        conditions = {
            **stamps,
            "cores": os.cpu_count(),
            "simulated": "weights",
            "geometry": model.name,
            "checkpoint_bytes": size,
            **loading,
        }
        write_json(options.out, {**conditions, "rows": rows})


def _run(options: argparse.Namespace, cache: str) -> dict[str, Any]:
    """One start in a process of its own. Raises CalledProcessError when it fails."""
    own = ["--device", options.device, "--max-batch", options.max_batch, "--max-context", options.max_context]
    command = [sys.executable, "-m", "bench.start", "--directory", options.directory, *own, "--start", time.time()]
    environment = {**os.environ, "LOWLAT_KERNEL_CACHE": cache}
    found = subprocess.run(
        [str(part) for part in command], env=environment, capture_output=True, text=True, check=False
    )
    if found.returncode:
        sys.stderr.write(found.stderr)
        found.check_returncode()
    result: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
