"""Hybrids of gated delta nets and attention: forms of files, states of slots, ranks, formats, and what is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from recording import assert_same, prompt_of, run_all, run_one, traced
from safetensors.torch import load_file, save_file
from stages import later
from tiny_models import make_pair, make_target, transformers_logits

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.checkpoint.quantising import Quantiser
from lowlat.errors import ConfigError
from lowlat.models.target import load_target, open_target
from lowlat.models.weight_plan import weight_plan
from lowlat.sequence.recurrent import RecurrentState
from lowlat.tools.quantize import quantise_checkpoint

OPTIONS: dict[str, Any] = {"max_batch": 2, "max_context": 96, "block_size": 8, "prefill_chunk": 16} | {
    "device": "cpu",
    "dtype": "float32",
}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
SAMPLED = SamplingParams(max_tokens=18, temperature=1.0, seed=4)
MOE = {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 96}
CUT = {"linear_num_value_heads": 8, "linear_value_head_dim": 16, "num_attention_heads": 8, "head_dim": 16}


def rewrite(directory: Path, rename: Mapping[str, str], config: dict[str, Any], **more: torch.Tensor) -> None:
    """Give the tensors other beginnings of their names, add some, and write another config."""
    stored = load_file(directory / "model.safetensors")
    for old, new in rename.items():
        stored = {new + name.removeprefix(old) if name.startswith(old) else name: x for name, x in stored.items()}
    save_file({**stored, **more}, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))


def wrap(directory: Path, family: str, **outer: Any) -> None:
    """Make a text model's files those of a vision-language model with an MTP layer."""
    text = json.loads((directory / "config.json").read_text())
    text.pop("architectures")
    text.setdefault("mtp_num_hidden_layers", 1)
    name = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[family]
    config = {"model_type": family, "architectures": [f"{name}ForConditionalGeneration"], "text_config": text} | {
        "vision_config": {"depth": 2, "hidden_size": 8},
        "image_token_id": 90,
        "video_token_id": 91,
        "vision_start_token_id": 92,
        "vision_end_token_id": 93,
        **outer,
    }
    seen = {"model.visual.blocks.0.norm1.weight": torch.ones(4), "mtp.fc.weight": torch.ones(4, 8)}
    rewrite(directory, {"model.": "model.language_model."}, config, **seen)


def fuse_experts(directory: Path, layer: int) -> None:
    """Write a layer's experts, which transformers stores one by one, as two tensors."""
    stored = load_file(directory / "model.safetensors")
    of, numbers = f"model.layers.{layer}.mlp.experts", range(5)

    def taken(part: str) -> list[torch.Tensor]:
        return [stored.pop(f"{of}.{number}.{part}_proj.weight") for number in numbers]

    stored[f"{of}.gate_up_proj"] = torch.cat((torch.stack(taken("gate")), torch.stack(taken("up"))), 1)
    stored[f"{of}.down_proj"] = torch.stack(taken("down"))
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})


def decoded(directory: Path, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """A greedy completion and its logits."""
    with Runtime.load(directory, **OPTIONS) as runtime:
        tokens, logits = traced(runtime, prompt, SamplingParams(max_tokens=12))
    return tokens, torch.stack([logits[len(prompt) + k] for k in range(len(tokens))])


@pytest.mark.parametrize("family", [later("qwen3_5_text"), "qwen3_5_moe_text"])
def test_other_files_of_a_model_give_its_bits(family: str, tmp_path: Path) -> None:
    """Inside a vision-language model's files, a layer's experts in one tensor; what is no part of it is skipped."""
    model = make_target(tmp_path, family)
    prompt = prompt_of(37)
    tokens, logits = decoded(tmp_path, prompt)
    if family == "qwen3_5_moe_text":
        fuse_experts(tmp_path, 1)
    wrap(tmp_path, family.removesuffix("_text"))
    found = decoded(tmp_path, prompt)
    assert found[0] == tokens and torch.equal(found[1], logits)
    expected = transformers_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("outer", "has_head"), [(False, True), (True, False), (True, True)])
def test_files_say_whether_the_lm_head_is_the_embedding(outer: bool, has_head: bool, tmp_path: Path) -> None:
    """Whatever the wrapper's config and its text's say."""
    make_target(tmp_path, "qwen3_5_text", tie_word_embeddings=not has_head)
    wrap(tmp_path, "qwen3_5", tie_word_embeddings=outer)
    loaded = load_target(tmp_path, dtype="float32")
    assert loaded.config.tie_embeddings != has_head
    assert torch.equal(loaded.weights["lm_head.weight"], loaded.weights["embed.weight"]) != has_head


@pytest.mark.second
def test_nan_in_a_state_ends_its_request_alone(tmp_path: Path) -> None:
    """And nothing of it is left to the next request in its slot."""
    pair, prompts = make_pair(tmp_path, "qwen3_next"), [prompt_of(9), prompt_of(21, seed=1)]
    draft = SpeculativeConfig(model=pair.head, num_speculative_tokens=3, strict=True)
    with Runtime.load(pair.target, draft, **OPTIONS) as runtime:
        truths = [run_one(runtime, prompt, SAMPLED) for prompt in prompts]
        names = [runtime.submit(prompt, SAMPLED) for prompt in prompts]
        tokens: dict[str, list[int]] = {name: [] for name in names}
        ends: dict[str, str | None] = {}
        states = [name for name in runtime.executor.state if name.startswith(("conv_state.", "delta_"))]
        slot = None
        for number in range(400):
            if number == 4:
                slot = runtime.scheduler.slot(names[0])
                assert slot is not None and all(runtime.executor.state[name][slot].any() for name in states)
                runtime.executor.state["delta_state.0"][slot, 1, 2, 3] = torch.nan
            for output in runtime.step():
                tokens[output.request_id] += output.token_ids
                ends[output.request_id] = output.finish_reason
            if not runtime.busy:
                break
        assert ends == {names[0]: "error", names[1]: "length"} and tokens[names[1]] == truths[1]
        assert 0 < len(tokens[names[0]]) < 18 and tokens[names[0]] == truths[0][: len(tokens[names[0]])]
        assert [name for name in states if runtime.executor.state[name][slot].any()] == []
        assert [run_one(runtime, prompt, SAMPLED) for prompt in prompts] == truths
        assert runtime.executor.state["delta_state.0"].isfinite().all()


@pytest.mark.second
def test_cancelled_requests_leave_nothing_and_prefixes_give_hits(tmp_path: Path) -> None:
    make_target(tmp_path, "qwen3_5_text")
    prompt = prompt_of(50)
    with Runtime.load(tmp_path, NGRAM, **{**OPTIONS, "max_batch": 1}) as runtime:
        truth = run_one(runtime, prompt, SAMPLED)
        for steps in (0, 3):
            name = runtime.submit(prompt_of(40, seed=steps), SAMPLED)
            for _ in range(steps):
                runtime.step()
            runtime.cancel(name)
            run_all(runtime)
            assert run_one(runtime, prompt, SAMPLED) == truth
        assert runtime.kvcache.stats().hit_tokens > 0


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"tree": [[0], [1], [0, 0]], "num_speculative_tokens": 2}, "trees of drafts"),
        ({"dynamic_tree_max_topk": 3, "num_speculative_tokens": 2}, "trees of drafts"),
        ({"enable_specpv": True, "num_speculative_tokens": 3}, "enable_specpv"),
    ],
)
def test_trees_and_specpv_are_refused_by_name(options: dict[str, Any], what: str, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "qwen3_next")
    with pytest.raises(ConfigError, match=f"{what}.* not implemented for targets with gated delta nets"):
        Runtime.load(pair.target, SpeculativeConfig(model=pair.head, strict=True, **options), **OPTIONS)


@pytest.mark.wide
def test_the_number_of_ranks_changes_no_bit(tmp_path: Path) -> None:
    """By value heads: 1, 2 and 8 ranks, with drafts and without."""
    make_target(tmp_path, "qwen3_5_moe_text", linear_num_key_heads=2, **CUT, **MOE)
    prompt, found = prompt_of(25), []
    for size in (1, 8):
        with Runtime.load(tmp_path, NGRAM, tensor_parallel_size=size, tp_invariant=True, **OPTIONS) as runtime:
            found.append(traced(runtime, prompt, SAMPLED))
            assert runtime.executor.state["delta_state.0"].shape[1] == 8 // size
    assert_same(*found)
    with Runtime.load(tmp_path, tensor_parallel_size=2, **OPTIONS) as runtime:
        assert run_one(runtime, prompt, SAMPLED) == found[0][0]  # rounding apart, as whole


def test_heads_that_cannot_be_shared_out_are_refused(tmp_path: Path) -> None:
    make_target(tmp_path, "qwen3_5_text", **{**CUT, "linear_num_value_heads": 6, "intermediate_size": 96})
    wanted = "is more than 2, the parts of linear_num_value_heads 6 with linear_num_key_heads 2"
    with pytest.raises(ConfigError, match=wanted):
        Runtime.load(tmp_path, tensor_parallel_size=4, **OPTIONS)


@pytest.mark.second
def test_files_that_are_written_rounded_are_those_rounded_at_load(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "linear_num_value_heads": 8, "linear_value_head_dim": 16}
    make_target(tmp_path / "plain", "qwen3_5_moe_text", **sizes, moe_intermediate_size=64)
    quantise_checkpoint(tmp_path / "plain", tmp_path / "fp8", Quantiser("fp8"))
    found, ways = [], list[tuple[str, Any]]([("fp8", {}), ("plain", {"quantize": "fp8"})])
    for name, options in ways:
        with Runtime.load(tmp_path / name, **OPTIONS, **options) as runtime:
            found.append(run_one(runtime, prompt_of(19), SAMPLED))
    assert found[0] == found[1]


def test_the_state_of_a_slot_and_the_plan_of_weights(tmp_path: Path) -> None:
    """Numbers of bytes by hand; the plan lists what files give."""
    make_target(tmp_path, "qwen3_5_moe_text")
    target = open_target(tmp_path, dtype="float32")
    state = RecurrentState(target.config, 3, 5)
    channels = 2 * 2 * 12 + 6 * 20
    row, pending = 4 * 6 * 12 * 20 + 4 * (3 + 5) * channels, 4 * 10 * (2 * 12 + 6 * 20 + 6)
    assert state.snapshot_bytes == 2 * row and state.num_bytes == 3 * (2 * (row + pending) + 4) + 20
    assert state.slot_bytes() == {"state_bytes_per_slot": 2 * (row + pending) + 24, "snapshot_bytes": 2 * row}
    plan, found = weight_plan(target.config), target.weights.loaded()
    assert {name: (tuple(x.shape), x.dtype) for name, x in found.items()} == dict(plan)
    assert found["layers.0.delta_a.weight"].dtype == torch.float32
    assert found["layers.1.experts.gate_up.weight"].shape == (6, 48, 32)
    assert found["layers.1.router.weight"].shape == (6, 32)
