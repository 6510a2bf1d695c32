"""Times of one chunk's prefill on random weights, by few layers, as it is captured and as the host launches it.

    python -m bench.prefill --layers 4 --chunk 128 512 2048 --commit C --out /tmp/prefill.json
    python -m bench.prefill --model llama-8b --layers 4 --chunk 128 512 --start 4096 --out /tmp/prefill.json
    python -m bench.prefill --layers 1 --chunk 512 2048 --pairs 32 64 96 --warps 4 8 --out /tmp/prefill.json
    python -m bench.prefill --small --device cpu --chunk 64 --out /tmp/prefill.json

A row has the time of the layers that were run, by the host's clock from the first launch to the end of the last; what
all layers would take is that time in proportion, and says so. `captured` tells one graph's launch from operations that
the host launches one by one; both run in turns. Of a mixture, its experts' products are measured alone, too: rows of
one layer, of rows that choose their experts at random, in tiles as prefill cuts them. `--pairs`, `--warps` and `--skip`
ask for other tiles, larger blocks, and other numbers of tiles of 8 pairs that are left out together, beside.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.clock import Timed, own_stream, percentile, time_waited
from bench.conditions import release, stamps_of, write_json
from bench.gpt_oss_cases import SMALL, OssModel
from bench.gpt_oss_step import Weights
from bench.grouped_products import Choices, measure
from bench.lowlat_step import BLOCK_SIZE
from bench.targets import BY_NAME, Model, target_shapes, target_weights
from lowlat.executors.allocation import STATE_ROLES, pinned_names
from lowlat.executors.device_weights import DeviceWeights
from lowlat.executors.launcher import Launcher
from lowlat.executors.lowering.weight_layouts import expert_parts, weight_permutations
from lowlat.executors.prefill.arguments import ChunkArguments
from lowlat.executors.prefill.chunk import BoundPrefill
from lowlat.executors.prefill.graphs import capture_prefills
from lowlat.executors.prefill.room import room_of
from lowlat.graphs import Bucket, BufferSet, Paging, Role
from lowlat.program.program import Program
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.decode import build_step
from lowlat.step.prefill import build_prefill
from lowlat.step.state import StepGeometry

__all__ = ["main", "measure_chunk"]

TURN = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every chunk, print its rows, and write them where that is asked for."""
    options = _options(arguments)
    device = torch.device(options.device)
    whole = SMALL if options.small else BY_NAME[options.model]
    model = replace(whole, num_layers=min(options.layers, whole.num_layers))
    stamps = stamps_of(device, options.commit)
    rows: list[dict[str, Any]] = []
    with own_stream(device):
        launcher = Launcher(device) if device.type == "cuda" else None
        weights = target_weights(model, device)
        if launcher is not None and isinstance(model, OssModel):
            choices = Choices(options.pairs, options.warps, options.skip)
            rows += measure(launcher, weights, options.chunk, choices, options.replays)
        for chunk in options.chunk:
            found = measure_chunk(model, chunk, options.start, weights, device, launcher, options.replays)
            rows += [{**_described(whole, model, chunk, options.start, row), **row} for row in found]
            release(device)
    rows = [{**row, **stamps} for row in rows]
    for row in rows:
        print(json.dumps(row))
    if options.out is not None:
        write_json(options.out, rows)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(BY_NAME), default="120b")
    parser.add_argument("--layers", type=int, default=4, help="that are made and run, of the model's")
    parser.add_argument("--chunk", type=int, nargs="+", default=[128, 512, 2048], help="tokens, multiples of 32")
    parser.add_argument("--start", type=int, default=0, help="the chunk's first position")
    parser.add_argument("--pairs", type=int, nargs="*", default=[], help="of a tile, multiples of 16, see above")
    parser.add_argument("--warps", type=int, nargs="*", default=[], help="of a block, see above")
    parser.add_argument("--skip", type=int, nargs="*", default=[], help="tiles of 8 pairs, see above")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="a tiny geometry, to try everything")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    if any(each < 1 or each % BLOCK_SIZE for each in options.chunk):
        parser.error(f"--chunk wants multiples of {BLOCK_SIZE}")
    if options.start < 0 or any(options.start % each for each in options.chunk):
        parser.error("--start wants a multiple of every --chunk: chunks start nowhere else")
    if min((*options.pairs, *options.warps, *options.skip, options.layers, options.replays)) < 1:
        parser.error("--pairs, --warps, --skip, --layers and --replays want at least 1")
    return options


def measure_chunk(
    model: Model,
    chunk: int,
    start: int,
    weights: Weights,
    device: torch.device,
    launcher: Launcher | None,
    replays: int,
) -> list[dict[str, Any]]:
    """Times of one whole chunk behind `start` random keys and values, ms: launched one by one, and captured."""
    prefill, buffers, arguments, way = _make(model, chunk, start, weights, device, launcher)
    ways = {False: prefill.run}
    graph = None
    if device.type == "cuda":
        release(device)
        before = torch.cuda.memory_reserved(device)
        graph = capture_prefills({chunk: prefill}, torch.cuda.current_stream(device))[chunk]
        way["graph_bytes"] = torch.cuda.memory_reserved(device) - before
        ways[True] = graph.replay
    entries = {captured: Timed(f"captured: {captured}", run, arguments.send) for captured, run in ways.items()}
    for done in range(0, replays, TURN):
        for entry in entries.values():
            entry.ms += time_waited(entry, min(TURN, replays - done), TURN, device)
    if "prefill.expert_ids" in buffers:
        distinct = len(set(buffers["prefill.expert_ids"].flatten().tolist()))
        way["distinct_experts_of_the_last_layer"] = distinct
    if graph is not None:
        graph.reset()
    prefill.clear()
    return [{**_times(entry), "captured": captured, **way} for captured, entry in entries.items()]


def _times(entry: Timed) -> dict[str, float]:
    values = {"ms_p50": entry.median, "ms_p99": percentile(entry.ms, 99), "ms_least": min(entry.ms)}
    return {name: round(value, 3) for name, value in values.items()}


def _shapes(model: Model, chunk: int, start: int) -> StepGeometry:
    """A context of twice what the chunk looks at, which is to change no time; a pool of the chunk's prefix."""
    num_blocks = (start + 2 * chunk) // BLOCK_SIZE + 2
    shapes = target_shapes(model, start + chunk)
    return replace(shapes, prefill_chunk=chunk, num_blocks=num_blocks, max_context=2 * (start + chunk))


def _make(
    model: Model, chunk: int, start: int, weights: Weights, device: torch.device, launcher: Launcher | None
) -> tuple[BoundPrefill, BufferSet, ChunkArguments, dict[str, Any]]:
    chain, shapes = TreeTopology.chain(0), _shapes(model, chunk, start)
    program, steps = build_prefill(shapes), [build_step(shapes, Bucket(1, 1, 0), chain)]
    matrices = {op.weights["weight"] for each in (program, *steps) for op in each.ops if op.kind == "linear"}
    held = DeviceWeights(weights, matrices, device, weight_permutations(steps), expert_parts(steps))
    arguments = ChunkArguments(program, device)
    buffers = _buffers(program, device, arguments)
    _fill(buffers, model.vocab_size, chunk, start)
    described: dict[str, Any] = {"room_bytes": room_of(program, held.shape).num_bytes}
    prefill = BoundPrefill(program, {**buffers, **arguments.device}, held, launcher=launcher)
    return prefill, buffers, arguments, described


def _buffers(program: Program, device: torch.device, arguments: ChunkArguments) -> BufferSet:
    specs = list(program.specs(*STATE_ROLES, Role.SCRATCH, Role.CONSTANT))
    constants = {name: content.to(device) for name, content in program.constants.items()}
    pinned = pinned_names(specs) if device.type == "cuda" else ()
    return BufferSet(specs, device, constants, pinned=pinned, given=arguments.host)


def _fill(buffers: BufferSet, vocab_size: int, chunk: int, start: int) -> None:
    for name, spec in buffers.specs.items():
        if spec.paging is Paging.POSITIONS:
            buffers[name].normal_()
    buffers["prefill_tokens"].random_(vocab_size)
    width = min(buffers["prefill_table"].shape[1], (start + chunk) // BLOCK_SIZE)
    buffers["prefill_table"][0, :width] = torch.arange(1, width + 1)
    buffers["prefill_chunk"].copy_(torch.tensor([start, chunk]))
    buffers["prefill_live"].fill_(1)
    buffers["prefill_positions"].copy_(torch.arange(start, start + chunk))


def _described(whole: Model, model: Model, chunk: int, start: int, row: dict[str, Any]) -> dict[str, Any]:
    scaled = row["ms_p50"] * whole.num_layers / model.num_layers
    return {
        "name": f"{whole.name}, {model.num_layers} of {whole.num_layers} layers, chunk of {chunk} at {start}"
        f"{', captured' if row['captured'] else ''}",
        "layers": model.num_layers,
        "layers_of_the_model": whole.num_layers,
        "chunk": chunk,
        "start": start,
        "all_layers_ms_in_proportion": round(scaled, 2),
        "all_layers_tokens_per_s_in_proportion": round(1e3 * chunk / scaled, 1),
    }


if __name__ == "__main__":
    raise SystemExit(main())
