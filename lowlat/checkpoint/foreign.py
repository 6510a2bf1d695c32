"""This module recognises models in formats that lowlat does not read, by file names, and says what to use instead.

It opens no file but an adapter's config, for the name of the adapter's model.
"""

from collections.abc import Iterable
from pathlib import Path

from lowlat.checkpoint.json_file import read_object, shown
from lowlat.errors import ConfigError

__all__ = ["ADAPTER_FILE", "foreign_directory", "foreign_files"]

ADAPTER_FILE = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
OTHERS = {".h5": "TensorFlow", ".msgpack": "Flax", ".onnx": "ONNX", ".npz": "NumPy", ".nemo": "NeMo"}


def foreign_files(names: Iterable[str]) -> str | None:
    """Return why a model with files of these names is not read, and what to use instead; None if nothing is known."""
    names = sorted(names)
    if ADAPTER_FILE in names or any(name in names for name in ADAPTER_WEIGHTS):
        return "it is an adapter (LoRA), which lowlat does not apply; merge it into its model and take the result"
    gguf = [name for name in names if name.lower().endswith(".gguf")]
    if gguf:
        return (
            f"found {shown(gguf[0])}: GGUF is not read; take the model's repository with safetensors, where AWQ, GPTQ "
            "or FP8 files are as small"
        )
    consolidated = [name for name in names if name.startswith("consolidated") and name.endswith(".safetensors")]
    if consolidated:
        return (
            f"found {shown(consolidated[0])}, Mistral's own layout, which is not read; take the files that begin with "
            "'model' of the same repository"
        )
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        return f"found {shown(pickles[0])}: pickles are never read, convert it to safetensors"
    for name in names:
        ending = Path(name).suffix
        if ending in OTHERS:
            return f"found {shown(name)}: {OTHERS[ending]} files are not read, convert it to safetensors"
    return None


def foreign_directory(directory: Path) -> str | None:
    """Return what `foreign_files` says of a directory's files, with the model of an adapter."""
    try:
        why = foreign_files(entry.name for entry in directory.iterdir())
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be read: {error.strerror}") from error
    if why is None or not (directory / ADAPTER_FILE).exists():
        return why
    base = read_object(directory / ADAPTER_FILE).get("base_model_name_or_path")
    return f"{why} (it is for {shown(base)})" if isinstance(base, str) and base else why
