"""The memory wall: the bandwidth at which this card's memory can be read by a kernel, GB/s.

    python -m bench.wall

Reads 4 GiB of random data in several ways and takes the fastest; what was read is checked by its exclusive or. The
figure is the denominator of every share of the wall, and is measured in the run that uses it.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from bench.clock import Timed, own_stream, round_robin

__all__ = ["Wall", "exclusive_or", "measure_wall"]

GIBIBYTE = 1 << 30
WAYS = ((512, 4, False), (512, 4, True), (1024, 2, False), (256, 8, False), (512, 8, False), (512, 16, False))
REPLAYS = 40
TURN = 10


@dataclass(frozen=True)
class Wall:
    """Median bandwidth of the fastest way to read, and of each way."""

    gb_per_s: float
    read_bytes: int
    replays: int
    ways: dict[str, float]


def exclusive_or(words: torch.Tensor) -> int:
    """The exclusive or of all words [n] of an integer dtype; takes half of their memory more."""
    while words.numel() > 1:
        half = words.numel() // 2
        folded = words[:half] ^ words[half : 2 * half]
        if words.numel() % 2:
            folded[0] ^= words[-1]
        words = folded
    return int(words.item())


def measure_wall(device: torch.device, read_bytes: int = 4 * GIBIBYTE, replays: int = REPLAYS) -> Wall:
    """Measure on a CUDA device. Raises ArithmeticError if a way did not read all of the data."""
    from lowlat.executors.launcher import Launcher
    from lowlat.kernels.stream_read import stream_read

    launcher = Launcher(device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    source = torch.empty(read_bytes // 8, dtype=torch.int64, device=device).random_()
    expected = exclusive_or(source.view(torch.int32))
    entries = []
    for threads, blocks_each, spread in WAYS:
        blocks = processors * blocks_each
        out = torch.zeros(blocks * threads, dtype=torch.int32, device=device)
        (call,) = stream_read(source, out=out, blocks=blocks, threads=threads, spread=spread)
        launcher.run(call)
        if exclusive_or(out) != expected:
            raise ArithmeticError(f"{call.kernel.name} did not read every word once")
        launch, stream = launcher.prepare(call), launcher.stream()
        entries.append(Timed(call.kernel.name, lambda launch=launch, stream=stream: launch.issue(stream)))  # type: ignore[misc]
    round_robin(entries, replays, TURN, device)
    ways = {entry.name: read_bytes / entry.median / 1e6 for entry in entries}
    return Wall(max(ways.values()), read_bytes, replays, ways)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the wall as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--gib", type=int, default=4, help="GiB to read")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    with own_stream(device):
        print(json.dumps(asdict(measure_wall(device, options.gib * GIBIBYTE)), indent=1))


if __name__ == "__main__":
    main()
