"""Training of draft models: a few steps lower the loss, and what is written is a draft model that loads."""

import json
from pathlib import Path

import pytest
import torch
from benches import bench

from lowlat import SpeculativeConfig
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
