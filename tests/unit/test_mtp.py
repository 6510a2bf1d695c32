"""Drafts of a target's own MTP layer: they change no token, whatever they are; refusals; draft vocabularies."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_layers import quantise_target
from recording import prompt_of, run_one
from safetensors.torch import load_file, save_file
from stages import later, wide
from text_tokenizers import byte_level, write_directory
from tiny_dflash import dflash_draft_model
from tiny_models import copying_draft_model, make_target
from tiny_mtp import add_mtp

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.checkpoint.tensors import Checkpoint
from lowlat.errors import ConfigError
from lowlat.models.target import open_target, read_model_config
from lowlat.speculators.methods import load_speculator, plan_speculator
from lowlat.speculators.mtp.speculator import MtpSpeculator

OPTIONS: dict[str, Any] = {"max_batch": 3, "max_context": 96, "block_size": 4, "prefill_chunk": 8, "device": "cpu"}
QUANTISED: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "linear_key_head_dim": 16} | {
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid that has an MTP layer, which is often right."""
    path = tmp_path_factory.mktemp("hybrid")
    make_target(path, "qwen3_5_text", gain=0.3)
    add_mtp(path, copies=True)
    return path


def mtp(depth: int = 3, **options: Any) -> SpeculativeConfig:
    return SpeculativeConfig(**{"method": "mtp", **options}, num_speculative_tokens=depth, strict=True)


def acceptance(runtime: Runtime) -> int:
    return int(runtime.summary()["eagle_speculation"]["total_accepted_tokens"])


@pytest.mark.parametrize(
    ("family", "quantised", "options"),
    [
        ("qwen3_5_text", "nvfp4", {}),
        wide("qwen3_5_text", "fp8-channel", {"text_drafts": "suffix"}),
        later("qwen3_5_moe_text", None, {"draft_quantize": "fp8", "draft_window": 6}),
    ],
)
def test_layers_as_files_have_them(family: str, quantised: str | None, options: dict[str, Any], tmp_path: Path) -> None:
    """Of NVFP4's files fc is plain, which their configs do not say."""
    make_target(tmp_path, family, gain=0.3, **(QUANTISED if quantised else {}))
    add_mtp(tmp_path, copies=not quantised)
    if quantised:
        quantise_target(tmp_path, quantised, None)
    prompt, sampling = prompt_of(13), SamplingParams(max_tokens=12)
    own = {**OPTIONS, "dtype": "bfloat16"} if quantised else OPTIONS
    with Runtime.load(tmp_path, **own) as runtime:
        expected = run_one(runtime, prompt, sampling)
    with Runtime.load(tmp_path, mtp(3, **options), **own) as runtime:
        assert run_one(runtime, prompt, sampling) == expected
        assert isinstance(runtime.speculator, MtpSpeculator) or options.get("text_drafts")
        plan = runtime.geometry.speculator
        assert plan is not None
    source = open_target(tmp_path, dtype=own.get("dtype", "auto"))
    loaded = load_speculator(mtp(**options), source.config, source)
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in loaded.weights.items()}
    assert shapes.keys() == loaded.speculator.weight_plan(source.config.dtype).keys()
    assert loaded.speculator == plan_speculator(mtp(**options), source.config, tmp_path)
    assert "draft_model.fc.weight" in shapes or "draft_quantize" in options
    if quantised:
        assert any(name.startswith("draft_model.q.") and not name.endswith(".weight") for name in shapes)


def _without(path: Path, *gone: str) -> None:
    tensors = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(gone)}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})


def test_what_is_missing_is_refused_by_name(tmp_path: Path) -> None:
    make_target(tmp_path, "qwen3_5_text")
    with pytest.raises(ConfigError, match=r"they have none: tensor 'mtp.fc.weight' is missing; take a draft"):
        Runtime.load(tmp_path, mtp(), **OPTIONS)
    made = add_mtp(tmp_path)
    with pytest.raises(ConfigError, match=r"capture_layers must be one boundary from 0 to the target's 3 layers"):
        Runtime.load(tmp_path, mtp(capture_layers=(1, 2)), **OPTIONS)
    _without(tmp_path, "mtp.layers.0.mlp.down_proj")
    with pytest.raises(ConfigError, match=r"tensor 'mtp.layers.0.mlp.down_proj.weight' is missing"):
        Runtime.load(tmp_path, mtp(), **OPTIONS)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["mtp.layers.1.input_layernorm.weight"] = made["mtp.norm.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"2 MTP layers .* are not implemented; one is"):
        Runtime.load(tmp_path, mtp(), **OPTIONS)
    _without(tmp_path, "mtp.")
    with pytest.raises(ConfigError, match=r"though its config states 1: whoever made this checkpoint left it out"):
        Runtime.load(tmp_path, mtp(), **OPTIONS)


def test_auto_takes_the_layer_or_what_the_draft_model_is_for(hybrid: Path, tmp_path: Path) -> None:
    sampling = SamplingParams(max_tokens=8)
    with Runtime.load(hybrid, mtp(2, method="auto"), **OPTIONS) as runtime:
        assert runtime.speculation_limits["method"] == "mtp" and runtime.speculation_limits["capture_layers"] == (3,)
        run_one(runtime, prompt_of(9), sampling)
        assert runtime.summary()["speculator"]["method"] == "mtp"
    model = make_target(tmp_path / "target", "llama")
    copying_draft_model(tmp_path / "head", model)
    with Runtime.load(tmp_path / "target", mtp(2, method="auto", model=tmp_path / "head"), **OPTIONS) as runtime:
        assert runtime.speculation_limits["method"] == "eagle3"
    with pytest.raises(ConfigError, match=r"method 'auto' finds nothing to draft with: the target's files .*target\)"):
        Runtime.load(tmp_path / "target", mtp(2, method="auto"), **OPTIONS)
    with Runtime.load(hybrid, **OPTIONS) as runtime:
        assert runtime.speculator is None  # without a method there is no speculation


@pytest.mark.second
def test_a_draft_vocabulary_changes_no_token(hybrid: Path, tmp_path: Path) -> None:
    """Of ids in a file, all or those that occur most; rows of the LM head are gathered."""
    prompt, sampling = [4, 5, 6] * 5, SamplingParams(max_tokens=24, temperature=0.7, seed=5)
    ids = tmp_path / "ids.json"
    with Runtime.load(hybrid, **OPTIONS) as runtime:
        expected = run_one(runtime, prompt, sampling)
    kept = sorted(set(expected[:15]))
    ids.write_text(json.dumps(kept * 3 + list(range(50, 55))))
    source = open_target(hybrid)
    lm_head = source.weights["lm_head.weight"]
    for size, count in ((None, len({*kept, *range(50, 55)})), (len(kept), len(kept))):
        options = mtp(3, draft_vocab=ids, draft_vocab_size=size)
        loaded = load_speculator(options, source.config, source)
        chosen = loaded.weights["draft_model.draft_to_target"].long()
        assert len(chosen) == count and set(kept) <= set(chosen.tolist())
        assert torch.equal(loaded.weights["draft_model.lm_head.weight"], lm_head[chosen])
        with Runtime.load(hybrid, options, **OPTIONS) as runtime:
            assert run_one(runtime, prompt, sampling) == expected
            assert acceptance(runtime) > 0
            report = runtime.summary()["speculator"]
        assert report["draft_vocab_size"] == count
        assert (report["draft_vocab_coverage"] is not None) == (size is not None)


def test_a_draft_vocabulary_is_counted_in_a_text(tmp_path: Path) -> None:
    """An EAGLE3 model's LM head is cut, too, whether it is its own or the target's."""
    model = make_target(tmp_path / "target", "llama", vocab_size=512, gain=0.3)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 90)
    prompt, sampling = prompt_of(12), SamplingParams(max_tokens=12)
    for own in (True, False):
        copying_draft_model(tmp_path / f"head{own}", model)
        if not own:
            _without(tmp_path / f"head{own}", "lm_head")
        options = mtp(3, method="eagle3", model=tmp_path / f"head{own}", draft_vocab=text, draft_vocab_size=24)
        if own:
            with pytest.raises(ConfigError, match=r"is a text, and the target has no tokenizer\.json"):
                Runtime.load(tmp_path / "target", options, **OPTIONS)
            write_directory(tmp_path / "target", byte_level())
        with Runtime.load(tmp_path / "target", **OPTIONS) as runtime:
            expected = run_one(runtime, prompt, sampling)
        with Runtime.load(tmp_path / "target", options, **OPTIONS) as runtime:
            assert run_one(runtime, prompt, sampling) == expected
            report = runtime.summary()["speculator"]
        assert report["draft_vocab_size"] == 24 and report["draft_vocab_coverage"] > 0.9
    copying_draft_model(tmp_path / "small", model, draft_vocab_size=40)
    options = mtp(3, method="eagle3", model=tmp_path / "small", draft_vocab=text)
    with pytest.raises(ConfigError, match="draft model has 40 tokens of its own choice"):
        Runtime.load(tmp_path / "target", options, **OPTIONS)


@pytest.mark.parametrize("rank", [None, later(8)])
def test_block_draft_models_read_boundaries_of_hybrids(hybrid: Path, tmp_path: Path, rank: int | None) -> None:
    """DFlash's and DSpark's layers have attention whatever the target's mixers are."""
    model = make_target(tmp_path / "target", "qwen3_5_text", gain=0.3)
    own = {} if rank is None else {"markov_rank": rank}
    dflash_draft_model(tmp_path / "head", model, layout="speculators", copies=True, **own)
    prompt, sampling = prompt_of(12), SamplingParams(max_tokens=12)
    with Runtime.load(tmp_path / "target", **OPTIONS) as runtime:
        expected = run_one(runtime, prompt, sampling)
    with Runtime.load(tmp_path / "target", mtp(3, method="auto", model=tmp_path / "head"), **OPTIONS) as runtime:
        assert run_one(runtime, prompt, sampling) == expected
        assert runtime.summary()["speculator"]["method"] == ("dflash" if rank is None else "dspark")


def test_no_speculator_reads_a_target_that_has_no_files(hybrid: Path) -> None:
    """Geometry alone tells the layer's sizes, as its files do."""
    config = read_model_config(hybrid)
    assert plan_speculator(mtp(), config) == plan_speculator(mtp(), config, hybrid)
    assert any(name.startswith("mtp.") for name in Checkpoint.open(hybrid).entries)
