"""`python -m bench.lib.wall` prints the memory wall of this GPU as JSON; see `lowlat.tools.profile.wall`."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

import torch

from bench.lib.clock import own_stream
from lowlat.tools.profile.wall import GIBIBYTE, Wall, exclusive_or, measure_wall

__all__ = ["Wall", "exclusive_or", "measure_wall"]


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
