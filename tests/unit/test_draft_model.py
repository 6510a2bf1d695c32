"""A whole model as draft model: that of the target's own weights is always right, and no other changes a token."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from paused_requests import paused_each_step
from quantised_layers import quantise_target
from recording import prompt_of, run_all, run_one
from stages import later, wide
from text_tokenizers import byte_level
from tiny_models import make_target, random_draft_model, write_draft_model

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.errors import ConfigError
from lowlat.models.target import read_model_config
from lowlat.speculators.methods import draft_method, load_speculator, plan_speculator

OPTIONS: dict[str, Any] = {"max_batch": 2, "max_context": 96, "block_size": 4, "prefill_chunk": 8} | {
    "device": "cpu",
    "dtype": "float32",
}
GREEDY, SAMPLED = SamplingParams(max_tokens=17), SamplingParams(max_tokens=17, temperature=1.0, seed=5)


INT4 = {"draft_quantize": "int4"}


def drafting(model: Path, depth: int = 5, **options: Any) -> SpeculativeConfig:
    return SpeculativeConfig(model, "draft_model", num_speculative_tokens=depth, strict=True, **options)


def plain(target: Path, prompt: list[int], sampling: SamplingParams, **options: Any) -> list[int]:
    with Runtime.load(target, **{**OPTIONS, **options}) as runtime:
        return run_one(runtime, prompt, sampling)


def totals(runtime: Runtime) -> tuple[int, int]:
    """Accepted drafts, and all."""
    counts = runtime.summary()["eagle_speculation"]
    return counts["total_accepted_tokens"], counts["total_draft_tokens"]


@pytest.mark.second
@pytest.mark.parametrize(
    ("family", "ways"),
    [
        ("gemma4_text", {}),  # windows, two sizes of heads, embeddings of each layer, scales, a softcap
        wide("gpt_oss", {}),  # windows, sinks, experts
    ],
)
def test_a_model_is_always_right_about_itself(family: str, ways: dict[str, Any], tmp_path: Path) -> None:
    """Of every position its keys and values are there: after prefill, after steps without drafts, on reused blocks."""
    make_target(tmp_path, family, gain=0.5, **ways)
    prompts = [prompt_of(19), [*prompt_of(16), *prompt_of(7, seed=1)], [3]]
    expected = [plain(tmp_path, prompt, GREEDY) for prompt in prompts]
    with Runtime.load(tmp_path, drafting(tmp_path), **OPTIONS) as runtime:
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert run_one(runtime, prompt, GREEDY) == tokens
            assert run_one(runtime, prompt, GREEDY, lambda number: (0, 5, 0, 1, 3)[number % 5]) == tokens
        accepted, drafted = totals(runtime)
        assert accepted == drafted > 40
        name = runtime.submit(prompts[0], GREEDY)
        run_all(runtime)
        assert runtime.metrics(name).cached_prompt_tokens == 16
        assert totals(runtime)[0] == totals(runtime)[1]
        assert runtime.summary()["speculator"]["draft_layers"] == runtime.model_config.num_layers


@pytest.mark.parametrize(
    ("family", "draft", "sampling", "ways"),
    [
        ("llama", {"num_hidden_layers": 1, "hidden_size": 32}, SAMPLED, {}),
        later("qwen3_5_text", {"num_hidden_layers": 1}, SAMPLED, {"adaptive_width": True}),  # a hybrid target
        wide("llama", {"vocab_size": 89}, SAMPLED, {"text_drafts": "suffix"}),
        wide("llama", {"vocab_size": 89, "tie_word_embeddings": True}, GREEDY, {"draft_quantize": "fp8"}),
        later("gpt_oss", {"vocab_size": 104}, GREEDY, {}),
        wide("qwen3", {"vocab_size": 104, "tie_word_embeddings": True, "intermediate_size": 64}, SAMPLED, INT4),
    ],
)
def test_no_draft_model_changes_a_token(
    family: str, draft: dict[str, Any], sampling: SamplingParams, ways: dict[str, Any], tmp_path: Path
) -> None:
    """Also of padded vocabularies of other sizes, whose rows are cut or filled."""
    make_target(tmp_path / "target", family, gain=0.3)
    make_target(tmp_path / "draft", "llama", gain=0.3, seed=1, **draft)
    prompt = prompt_of(23, seed=2)
    expected = plain(tmp_path / "target", prompt, sampling)
    prompt[3] = 96  # a token that a smaller vocabulary has not
    other = plain(tmp_path / "target", prompt, sampling)
    with Runtime.load(tmp_path / "target", drafting(tmp_path / "draft", **ways), **OPTIONS) as runtime:
        depths = random.Random(0).choices(range(6), k=99)
        assert run_one(runtime, prompt, sampling) == other
        assert run_one(runtime, prompt_of(23, seed=2), sampling, depths.__getitem__) == expected
        if not ways:
            assert totals(runtime)[1] > 0


@pytest.mark.second
@pytest.mark.parametrize("layout", ["fp8-channel", wide("awq"), wide("nvfp4")])
def test_quantised_files_draft_as_they_run(layout: str, tmp_path: Path) -> None:
    """A draft model in a format of its own, before a plain target; it is right about its own quantised target."""
    sizes: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 128}
    make_target(tmp_path / "plain", "llama", gain=0.4, **sizes)
    make_target(tmp_path / "stored", "llama", gain=0.4, **sizes)
    quantise_target(tmp_path / "stored", layout, None)
    prompt, options = prompt_of(11), {**OPTIONS, "dtype": "bfloat16"}
    for target in ("stored", "plain"):
        expected = plain(tmp_path / target, prompt, GREEDY, dtype="bfloat16")
        with Runtime.load(tmp_path / target, drafting(tmp_path / "stored", 3), **options) as runtime:
            assert run_one(runtime, prompt, GREEDY) == expected
            accepted, drafted = totals(runtime)
            assert drafted > 0 and (target == "plain" or accepted == drafted)


@pytest.mark.second
@pytest.mark.parametrize("tied", [True, wide(False)])
def test_ranks_share_it(tied: bool, tmp_path: Path) -> None:
    """Layers and LM head are cut, tied or not, and the drafts are one rank's."""
    shape: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
    make_target(tmp_path / "target", "qwen3", gain=0.4, tie_word_embeddings=tied, **shape)
    prompt, found = prompt_of(13), []
    for size in (1, 2):
        options = {**OPTIONS, "tp_invariant": True, "tensor_parallel_size": size}
        with Runtime.load(tmp_path / "target", drafting(tmp_path / "target"), **options) as runtime:
            found.append(run_one(runtime, prompt, GREEDY))
            accepted, drafted = totals(runtime)
            assert accepted == drafted > 0
            assert runtime.executor.state["draft_model.k_cache.0"].shape[1] == 2 // size
    assert found[0] == found[1]


def test_rows_that_wait_for_it_are_run_over_in_time(tmp_path: Path) -> None:
    """Steps without drafts leave them, more than one pass takes; where all lengths cost the same, drafts follow."""
    make_target(tmp_path, "qwen3", gain=0.5)
    long = SamplingParams(max_tokens=64)
    expected = plain(tmp_path, prompt_of(9), long)
    with Runtime.load(tmp_path, drafting(tmp_path, adaptive_width=True), **OPTIONS) as runtime:
        costs = torch.zeros_like(runtime.executor.state["draft_length_costs"])
        costs[:, 0] = 1
        runtime.executor.write_state({"draft_length_costs": costs})
        assert runtime.geometry.most_waiting == runtime.geometry.num_waiting == 32
        assert run_one(runtime, prompt_of(9), long, lambda number: 0 if number < 50 else 5) == expected
        accepted, drafted = totals(runtime)
        assert accepted == drafted > 5


def test_a_request_that_was_paused_keeps_the_draft_model_s_keys(tmp_path: Path) -> None:
    """After each of its steps: what drafts it is as right as without."""
    make_target(tmp_path, "qwen3", gain=0.5)
    with Runtime.load(tmp_path, drafting(tmp_path), **OPTIONS) as runtime:
        assert paused_each_step(runtime, (prompt_of(19), GREEDY)) == plain(tmp_path, prompt_of(19), GREEDY)
        accepted, drafted = totals(runtime)
        assert accepted == drafted > 10


def test_weights_are_those_of_the_plan(tmp_path: Path) -> None:
    """By name, shape and dtype, for every way in which vocabularies differ."""
    make_target(tmp_path / "target", "llama")
    target = read_model_config(tmp_path / "target", dtype="bfloat16")
    for size in (89, 97, 104):
        for tied in (False, True):
            for kind in (None, "fp8"):
                own = tmp_path / f"{size}-{tied}"
                if not own.exists():
                    make_target(own, "qwen3", vocab_size=size, tie_word_embeddings=tied, num_hidden_layers=1)
                options = drafting(own, draft_quantize=kind)
                found = load_speculator(options, target)
                planned = plan_speculator(options, target)
                assert planned == found.speculator
                plan = dict(planned.weight_plan("bfloat16"))
                same = found.weights.get("draft_model.lm_head.weight") is found.weights["draft_model.embed.weight"]
                assert same == (tied and size >= 97 and kind is None)
                made = {name: (tuple(each.shape), each.dtype) for name, each in found.weights.items()}
                if same:
                    del made["draft_model.lm_head.weight"]
                assert made == plan
                assert made["draft_model.embed.weight"][0][0] == 97
                assert found.weights["draft_model.draft_to_target"].tolist() == list(range(min(size, 97)))
    embedding = load_speculator(drafting(tmp_path / "89-True"), target).weights["draft_model.embed.weight"]
    assert not embedding[89:].any() and embedding[:89].any(dim=1).all()


def test_what_is_no_draft_model_of_the_target_is_refused_by_name(tmp_path: Path) -> None:
    model = make_target(tmp_path / "target", "qwen3")
    target = read_model_config(tmp_path / "target", dtype="float32")
    make_target(tmp_path / "large", "qwen3", vocab_size=1200)
    make_target(tmp_path / "hybrid", "qwen3_5_text")
    config, tensors = random_draft_model(tmp_path / "eagle", model)
    write_draft_model(tmp_path / "eagle", {**config["transformer_layer_config"], "model_type": "llama"}, tensors)
    for name, method, match in (
        ("large", "draft_model", "vocab_size 1200 is not the target's 97, nor within 1024 of it"),
        ("hybrid", "draft_model", "not implemented for draft models with gated delta nets, whose states would"),
        ("eagle", "draft_model", "takes a whole model, .* without fc.weight, .* EAGLE-1's and EAGLE-2's are not"),
    ):
        with pytest.raises(ConfigError, match=match):
            plan_speculator(SpeculativeConfig(tmp_path / name, method), target)
    assert [draft_method(tmp_path / name) for name in ("large", "hybrid", "eagle")] == ["draft_model"] * 2 + ["eagle3"]
    given: dict[str, Any] = {"capture_layers": (1,), "draft_window": 8, "tree": ((0,),)}
    for name, value in given.items():
        with pytest.raises(ConfigError, match=f"{name} is an option of method"):
            drafting(tmp_path, **{name: value})


def test_tokenizers_are_compared_where_both_are_at_hand(tmp_path: Path) -> None:
    """Ids of ordinary tokens must be the same; added ones may differ, and so may padding."""
    for name, size in (("target", 320), ("draft", 304)):
        make_target(tmp_path / name, "llama", vocab_size=size)
        byte_level().save(str(tmp_path / name / "tokenizer.json"))
    target = read_model_config(tmp_path / "target", dtype="float32")
    file = tmp_path / "draft" / "tokenizer.json"
    stored = json.loads(file.read_text())
    assert plan_speculator(drafting(tmp_path / "draft"), target, tmp_path / "target").draft_config is not None
    stored["added_tokens"] = []
    file.write_text(json.dumps(stored))
    plan_speculator(drafting(tmp_path / "draft"), target, tmp_path / "target")
    vocabulary = stored["model"]["vocab"]
    first, second = list(vocabulary)[9:11]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(stored))
    with pytest.raises(
        ConfigError, match=r"2 of the target's \d+ tokens have other ids or none here, first '.*', token"
    ):
        plan_speculator(drafting(tmp_path / "draft"), target, tmp_path / "target")


def test_masks_of_many_rows() -> None:
    """Each row sees those before it and itself, up to as many as a mask has bits."""
    from lowlat.speculators.draft_parts import seen_before

    masks = seen_before(2, 64)
    assert masks.shape == (2, 64) and masks[0, 0] == 1 and masks[1, 62] == (1 << 63) - 1 and masks[0, 63] == -1
    assert torch.equal(masks[0], masks[1])
