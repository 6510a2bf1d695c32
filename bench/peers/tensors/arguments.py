"""The command line that the engines' modules share, and the recording of a target's rows."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from lowlat.errors import ConfigError
from lowlat.tools.compare.recording import Recording, save_recording

__all__ = ["arguments", "integers", "target_recording", "write"]


def integers(text: str) -> list[int]:
    """Numbers separated by commas."""
    return [int(part) for part in text.split(",")]


def arguments(description: str | None, layers: str | None = None) -> argparse.ArgumentParser:
    """A parser of what every engine is asked for.

    layers  how the engine counts the layers that are to be chosen, for help; such engines run in bfloat16
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory, or a name that the engine knows")
    parser.add_argument("--token-ids", type=integers, required=True, metavar="ID,ID,...", help="the prompt")
    parser.add_argument("--num-tokens", type=int, default=16, help="tokens to decode, greedily")
    dtype = "float32" if layers is None else "bfloat16"
    parser.add_argument("--dtype", default=dtype, choices=["float32", "bfloat16"])
    if layers is not None:
        parser.add_argument("--layers", type=integers, required=True, metavar="I,I,...", help=layers)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="safetensors file to write")
    return parser


def target_recording(
    tokens: Sequence[int], num_prompt: int, residuals: Mapping[int, torch.Tensor], **stages: torch.Tensor
) -> Recording:
    """The recording of a target that ran all tokens but the last.

    residuals  by boundary: of B the residual stream entering layer B, [n - 1, N]
    stages     pre_head_hidden [m, N] and logits [m, V], of the last m positions
    Raises ConfigError for other row counts than that of the tokens that were run.
    """
    rows = {f"target.residual.{boundary}": residuals[boundary] for boundary in sorted(residuals)}
    rows |= {f"target.{name}": tensor for name, tensor in stages.items()}
    for name, tensor in rows.items():
        if tensor.dim() != 2 or tensor.shape[0] != len(tokens) - 1:
            raise ConfigError(
                f"{name} is {list(tensor.shape)}, and must have a row for each of {len(tokens) - 1} tokens"
            )
    return Recording(tuple(tokens), num_prompt, (), (), {name: tensor.float().cpu() for name, tensor in rows.items()})


def write(recording: Recording, out: Path) -> None:
    """Write the file, and say on standard error what it holds."""
    save_recording(recording, out)
    print(f"saved {len(recording.stages)} stages of {len(recording.tokens)} tokens to {out}", file=sys.stderr)
