"""This module finds the MTP layer in a target's files: its tensors, their storage, and its geometry.

The tensors decide, and config.json must agree with them (`mtp_num_hidden_layers`, or `num_nextn_predict_layers`). The
tensors' names begin with `mtp.` in every wrapper of the model.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lowlat.checkpoint.formats import Quantisation
from lowlat.checkpoint.tensors import FLOAT_NAMES, INDEX_FILE, SINGLE_FILE, Checkpoint, TensorEntry
from lowlat.errors import ConfigError
from lowlat.models.geometry import ModelConfig
from lowlat.models.hf_config import read_config
from lowlat.models.layer_spec import FFN, DenseSpec, ExpertsSpec
from lowlat.speculators.mtp.geometry import MtpConfig, mtp_config

__all__ = ["FC", "PREFIX", "has_layer", "open_files", "parse_mtp"]

PREFIX = "mtp."
FC = "mtp.fc.weight"
COUNT_KEYS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
LAYER = re.compile(r"mtp\.layers\.(\d{1,9})\.")
MLP = "mtp.layers.0.mlp"
EXPERTS = f"{MLP}.experts."
SHARED_LIKE = ("experts.0", "shared_expert")


def open_files(directory: Path) -> Checkpoint | None:
    """Read the headers of a target's weights; returns None if it has no weights yet. Raises ConfigError."""
    if not any((directory / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        return None
    return Checkpoint.open(directory)


def has_layer(directory: Path) -> bool:
    """Whether a target's files have an MTP layer; without weights its config decides. Raises ConfigError."""
    checkpoint = open_files(directory)
    return bool(_stated(directory)) if checkpoint is None else _is_there(checkpoint.entries)


def _is_there(entries: Mapping[str, TensorEntry]) -> bool:
    return any(name.startswith(PREFIX) for name in entries)


def _stated(directory: Path) -> int | None:
    """The number of MTP layers that config.json states; None: it states none."""
    fields = read_config(directory)
    found = (fields.optional_integer(key, 0, 1 << 10) for key in COUNT_KEYS)
    return next((count for count in found if count is not None), None)


def parse_mtp(
    target: ModelConfig, directory: Path, checkpoint: Checkpoint | None, capture_layers: Sequence[int] | None = None
) -> MtpConfig:
    """Read the geometry of a target's MTP layer; of the weights only headers are read.

    checkpoint      the target's; None: there are no weights yet, and only config.json says that there is a layer
    capture_layers  see `mtp_config`
    Raises ConfigError if there is no layer, or several, or one unlike the target's layers.
    """
    stated, entries = _stated(directory), {} if checkpoint is None else checkpoint.entries
    if not (_is_there(entries) if checkpoint is not None else stated):
        why = "" if not stated else f", though its config states {stated}: whoever made this checkpoint left it out"
        raise ConfigError(
            f"{directory}: method 'mtp' drafts with a layer in the target's files, and they have none: tensor "
            f"{FC!r} is missing{why}; take a draft model (method 'eagle3', 'dflash', ..), or files that have it"
        )
    found = {int(match[1]) for name in entries if (match := LAYER.match(name))} or {0}
    count = max(len(found), stated or 0)
    if count > 1 or found != {0}:
        raise ConfigError(
            f"{directory}: {count} MTP layers (mtp.layers, {' or '.join(COUNT_KEYS)}) are not implemented; one is"
        )
    quantisation = _as_found(target.quantisation, entries)
    config = mtp_config(target, _ffn(target, directory, entries, quantisation), capture_layers)
    fused = not any(name.startswith(f"{EXPERTS}0.") for name in entries)
    return replace(config, quantisation=quantisation, fused_experts=fused)


def _ffn(
    target: ModelConfig, directory: Path, entries: Mapping[str, TensorEntry], quantisation: Quantisation | None
) -> FFN | None:
    """The layer's FFN: the tensors decide its kind, the target's layers its sizes; None: that of the last layer.

    A shared expert that is stored in another format than the experts is kept apart from them, even if the target's
    layers join it with theirs.
    """
    if not entries:
        return None
    is_moe = any(name.startswith(EXPERTS) for name in entries)
    kind = ExpertsSpec if is_moe else DenseSpec
    found = next((each.ffn for each in reversed(target.layers) if isinstance(each.ffn, kind)), None)
    if found is None:
        said = "experts" if is_moe else "a dense FFN"
        raise ConfigError(f"{directory}: the MTP layer has {said}, and no layer of the target has: its size is unknown")
    if isinstance(found, ExpertsSpec) and found.shared and quantisation is not None:
        parts = [f"{part}_proj" for part in ("gate", "up", "down")]
        one, other = ([quantisation.stored(f"{MLP}.{of}.{part}") for part in parts] for of in SHARED_LIKE)
        if one != other:
            return replace(found, shared=False, shared_ffn=DenseSpec(inner_size=found.inner_size))
    return found


def _as_found(quantisation: Quantisation | None, entries: Mapping[str, TensorEntry]) -> Quantisation | None:
    """Copy the target's quantisation rules, with an exception for each module of the MTP layer that is stored plain.

    There are files whose `mtp.fc` is plain, although none of their lists names it.
    """
    if quantisation is None:
        return None
    plain = [
        name.removesuffix(".weight")
        for name, entry in entries.items()
        if name.startswith(PREFIX) and name.endswith(".weight") and entry.dtype in FLOAT_NAMES and len(entry.shape) > 1
    ]
    names = quantisation.plain
    return replace(quantisation, plain=replace(names, patterns=(*names.patterns, *(plain or ("mtp.fc",)))))
