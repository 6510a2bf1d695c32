"""Training of draft models: a few steps lower the loss, and what is written is a draft model that loads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benches import bench
from recording import Recorder, run_all

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.models.target import read_model_config
from lowlat.speculators.methods import draft_method, load_speculator


def tiny_target(directory: Path) -> Path:
    """Write a Llama of seven layers and its tokenizer of 257 ids, as training writes them, into a directory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    made = bench("training.tokenizer")
    made.save_tokenizer(made.train_tokenizer(["a few words, a few more words"] * 3, 257), directory, max_context=64)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=24, intermediate_size=40, num_hidden_layers=7, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("method", ["eagle3", "dspark"])
def test_the_loss_falls_and_the_draft_model_loads(method: str, tmp_path: Path) -> None:
    target, text, out = tiny_target(tmp_path / "target"), tmp_path / "text.txt", tmp_path / "head"
    documents = (f"number {number}: a few words, a few more words, a few words " * 8 for number in range(80))
    text.write_text("\n<|endoftext|>\n".join(documents))
    bench("training.draft_model").main(
        f"--target {target} --text {text} --out {out} --method {method} --device cpu --steps 9 --log-every 3 --rows 4 "
        "--text-length 40 --generated-share 0 --learning-rate 1e-2 --anchors 8 --drafts 3 --layers 1".split()
    )
    first, *_, last = json.loads((out / "loss.json").read_text())["log"]
    assert last["loss"] < first["loss"] and sum(last["match_by_step"]) > 1.5 * sum(first["match_by_step"])
    assert draft_method(out) == method
    found = load_speculator(SpeculativeConfig(method=method, model=out), read_model_config(target))
    assert found.weights and found.speculator.method == method


@pytest.mark.second
def test_a_trained_hybrid_is_what_others_read(tmp_path: Path) -> None:
    """Losses fall, transformers and the runtime give its logits, and the runtime drafts with its layer."""
    from transformers import AutoModelForCausalLM

    made, model = bench("training.tokenizer"), bench("training.hybrid_model")
    text, out = tmp_path / "text.txt", tmp_path / "hybrid"
    made.save_tokenizer(made.train_tokenizer(["a few words, a few more words"] * 3, 257), tmp_path, max_context=64)
    documents = (f"number {number}: a few words, a few more words, a few words " * 8 for number in range(200))
    text.write_text("\n<|endoftext|>\n".join(documents))
    bench("training.hybrid").main(
        f"--text {text} --tokenizer {tmp_path} --out {out} --device cpu --steps 12 --mtp-share 0.5 --log-every 3 "
        "--rows 4 --length 72 --hidden 24 --ffn 40 --layers 4 --heads 2 --kv-heads 1 --head-dim 16 --key-heads 1 "
        "--value-heads 2 --key-dim 8 --value-dim 16 --held-out-tokens 144 --learning-rate 1e-2 --draft-steps 3".split()
    )
    log = json.loads((out / "loss.json").read_text())["log"]
    target, mtp = ([entry for entry in log if entry["part"] == name] for name in ("target", "mtp"))
    assert target[-1]["loss"] < target[0]["loss"] and mtp[-1]["loss"] < mtp[0]["loss"]
    found, tokens = model.load_hybrid(out), torch.arange(150)[None] % 97
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = found.logits(found.model(tokens))
        torch.testing.assert_close(theirs(tokens).logits, logits, rtol=1e-4, atol=1e-4)
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "max_context": 160,
        "prefill_chunk": 16,
        "block_size": 8,
    }
    speculation = SpeculativeConfig(method="mtp", num_speculative_tokens=2, strict=True)
    with Runtime.load(out, speculation, **options) as runtime:
        recorder = Recorder(runtime)
        name = recorder.submit(tokens[0, :20].tolist(), SamplingParams(max_tokens=30))
        (answer,) = run_all(runtime).values()
        drafted = torch.stack([recorder.logits[name][20 + k] for k in range(30)])
    whole = torch.tensor([*tokens[0, :20].tolist(), *answer])[None]
    with torch.no_grad():
        logits = found.logits(found.model(whole))[0, 19:-1]
    torch.testing.assert_close(drafted, logits, rtol=1e-4, atol=1e-3)
