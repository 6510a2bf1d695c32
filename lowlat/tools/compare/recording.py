"""This module has the recording of one request's stages; its file is safetensors, which any engine can write.

lowlat/tools/README.md, "Checking a pair", lists the tensors with names, shapes and rows.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lowlat.errors import ConfigError

__all__ = ["Recording", "load_recording", "save_recording"]

STAGE = re.compile(
    r"target\.(residual\.\d{1,5}|pre_head_hidden|logits)"
    r"|draft\.(fc_out|\d{1,2}\.((layers\.\d{1,2}\.)?(attn_out|ffn_out)|pre_head_hidden|logits))"
)
INTEGERS = ("tokens", "num_prompt", "positions", "drafts")
STAGE_NAMES = (
    "target.residual.B, target.pre_head_hidden, target.logits, draft.fc_out, "
    "draft.K.{attn_out,ffn_out,pre_head_hidden,logits}, draft.K.layers.J.{attn_out,ffn_out}"
)


@dataclass(frozen=True)
class Recording:
    """One request's stages.

    tokens         prompt and completion
    num_prompt     tokens of the prompt
    positions      positions of the features from which drafts were made, one a step
    drafts         [steps][S] the drafted tokens
    stages         stage -> rows in float32, in order of computation where lowlat recorded them
    """

    tokens: tuple[int, ...]
    num_prompt: int
    positions: tuple[int, ...]
    drafts: tuple[tuple[int, ...], ...]
    stages: Mapping[str, torch.Tensor]


def save_recording(recording: Recording, path: str | Path) -> None:
    """Write a recording's file, and create its folder if needed. Raises ConfigError."""
    path = Path(path)
    tensors = {name: rows.contiguous() for name, rows in recording.stages.items()}
    tensors["tokens"] = torch.tensor(recording.tokens, dtype=torch.int64)
    tensors["num_prompt"] = torch.tensor([recording.num_prompt])
    if recording.positions:
        tensors["positions"] = torch.tensor(recording.positions, dtype=torch.int64)
        tensors["drafts"] = torch.tensor(recording.drafts, dtype=torch.int64)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def load_recording(path: str | Path) -> Recording:
    """Read a recording's file, of lowlat or of another engine. Raises ConfigError for anything else."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path} is no file; `lowlat compare --save FILE` writes one")
    try:
        with safe_open(path, framework="pt", backend="pread") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        return _recording(tensors)
    except (SafetensorError, KeyError, ValueError, RuntimeError, OSError) as error:
        problem = f"tensor {error} is missing" if isinstance(error, KeyError) else error
        raise ConfigError(f"{path} is not a recording, as `lowlat compare --save` writes them: {problem}") from error


def _recording(tensors: Mapping[str, torch.Tensor]) -> Recording:
    """Make a recording of a file's tensors. Raises KeyError for a missing tensor, ValueError for a wrong one."""
    none = torch.zeros(0, dtype=torch.int64)
    tokens, num_prompt = tensors["tokens"], tensors["num_prompt"]
    positions, drafts = tensors.get("positions", none), tensors.get("drafts", none[:, None])
    for name, tensor, rank in (("tokens", tokens, 1), ("positions", positions, 1), ("drafts", drafts, 2)):
        if tensor.is_floating_point() or tensor.dim() != rank:
            raise ValueError(f"{name} must be {rank} dimensions of integers, got {tensor.dtype} {list(tensor.shape)}")
    if num_prompt.numel() != 1 or not 1 <= int(num_prompt) <= len(tokens):
        raise ValueError(f"num_prompt must be one number, 1 to the {len(tokens)} tokens, got {num_prompt.tolist()}")
    if len(positions) != len(drafts):
        raise ValueError(f"there are {len(positions)} positions and {len(drafts)} rows of drafts")
    stages = {name: tensor for name, tensor in tensors.items() if name not in INTEGERS}
    for name, rows in stages.items():
        if STAGE.fullmatch(name) is None:
            raise ValueError(f"{name!r:.80} is no stage; stages are {STAGE_NAMES}")
        if rows.dim() != 2 or not rows.is_floating_point():
            raise ValueError(f"{name} must be rows of floats, got {rows.dtype} {list(rows.shape)}")
        of_target = name.startswith("target.")
        if len(rows) > len(tokens) - 1 if of_target else len(rows) != len(positions):
            limit = f"at most the {len(tokens) - 1} tokens run" if of_target else f"the {len(positions)} positions"
            raise ValueError(f"{name} has {len(rows)} rows, and must have {limit}")
    return Recording(
        tuple(tokens.tolist()),
        int(num_prompt),
        tuple(positions.tolist()),
        tuple(tuple(row) for row in drafts.tolist()),
        {name: rows.float() for name, rows in stages.items()},
    )
