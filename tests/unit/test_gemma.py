"""Gemma 2, 3 and 4: parity with transformers, windows that are freed, drafts, ranks, formats, and forms of files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import check_parity
from recording import assert_same, prompt_of, run_all, run_one, traced
from safetensors.torch import load_file, save_file
from stages import later, staged, wide
from tiny_dflash import dflash_draft_model
from tiny_gemma import E2B, E4B, GEMMA_3_27B, MOE
from tiny_models import make_pair, make_target

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.errors import ConfigError
from lowlat.models.target import load_target, open_target
from lowlat.models.weight_plan import weight_plan

OPTIONS: dict[str, Any] = {"max_batch": 2, "max_context": 128, "block_size": 8, "prefill_chunk": 32} | {
    "device": "cpu",
    "dtype": "float32",
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-2": ("gemma2", {}),
    "gemma-3-1b": ("gemma3_text", {}),
    "gemma-3-27b": ("gemma3_text", GEMMA_3_27B),
    "gemma-4-31b": ("gemma4_text", {}),
    "gemma-4-12b": ("gemma4_unified_text", {}),
    "gemma-4-26b-a4b": ("gemma4_text", MOE),
    "gemma-4-e4b": ("gemma4_text", E4B),
    "gemma-4-e2b": ("gemma4_text", E2B),
}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=7, prompt_lookup_min=1)
SAMPLED = SamplingParams(max_tokens=16, temperature=1.0, seed=4)
CUT: dict[str, Any] = {"num_attention_heads": 8, "intermediate_size": 96, "moe_intermediate_size": 96}


@pytest.mark.parametrize("name", staged(CASES, first=["gemma-2", "gemma-3-27b", "gemma-4-26b-a4b", "gemma-4-e2b"]))
def test_logits_and_greedy_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Over chunks of prefill and windows, which the prompt crosses more than once."""
    family, options = CASES[name]
    model = make_target(tmp_path, family, **options)
    assert len(set(check_parity(tmp_path, model, prompt_of(71), 24, **OPTIONS))) > 2


@pytest.mark.second
@pytest.mark.parametrize(
    ("name", "method"),
    [
        wide("gemma-4-31b", "eagle3"),
        ("gemma-4-e2b", "suffix"),
        wide("gemma-4-e2b", "eagle3"),
    ],
)
def test_drafts_neighbours_and_hits_change_no_bit(name: str, method: str, tmp_path: Path) -> None:
    family, options = CASES[name]
    pair = make_pair(
        tmp_path,
        family,
        num_hidden_layers=options.get("num_hidden_layers", 4),
        **{key: value for key, value in options.items() if key != "num_hidden_layers"},
    )
    prompt = prompt_of(67)
    with Runtime.load(pair.target, **{**OPTIONS, "prefix_reuse": False}) as runtime:
        expected = traced(runtime, prompt, SAMPLED)
    methods: dict[str, dict[str, Any]] = {"eagle3": {"model": pair.head}, "ngram": {"prompt_lookup_min": 1}}
    draft = SpeculativeConfig(method=method, num_speculative_tokens=7, strict=True, **methods.get(method, {}))
    with Runtime.load(pair.target, draft, **OPTIONS) as runtime:
        for depth in (0, 3, 7):
            assert_same(traced(runtime, prompt, SAMPLED, depth), expected)
        assert runtime.kvcache.stats().hit_tokens == 2 * 64
        names = [runtime.submit(each, SAMPLED) for each in (prompt, prompt_of(40, seed=3))]
        assert run_all(runtime)[names[0]] == expected[0]
        assert runtime.kvcache.pool_stats()["windows"][0]["num_used"] == 0


@pytest.mark.parametrize("flags", [later({}), wide({"markov_rank": 4, "layout": "speculators"})])
def test_draft_models_of_blocks_read_the_embedding_as_the_target_does(flags: dict[str, Any], tmp_path: Path) -> None:
    """DFlash's and DSpark's: scaled where it is the target's, as it is where it is their own."""
    target, prompt = make_target(tmp_path / "target", "gemma4_text", **MOE), prompt_of(40)
    with Runtime.load(tmp_path / "target", **OPTIONS) as runtime:
        tokens = run_one(runtime, prompt, SAMPLED)
    for own in (False, True):
        dflash_draft_model(tmp_path / f"{own}", target, own_embedding=own, captures=(1, 3), **flags)
        method = "dspark" if flags else "dflash"
        draft = SpeculativeConfig(method=method, model=tmp_path / f"{own}", num_speculative_tokens=3, strict=True)
        with Runtime.load(tmp_path / "target", draft, **OPTIONS) as runtime:
            program = runtime.executor.program(runtime.ladder.choose(1, 3))
            embeds = {op.weights["weight"]: op.params.get("scale") for op in program.ops if op.kind == "embed"}
            assert embeds["embed.weight"] == torch.tensor(32**0.5).item()
            assert not own or embeds["draft_model.embed.weight"] is None
            counts = [op for op in program.ops if op.kind == "embed" and op.params.get("scale") is not None]
            assert len(counts) == (1 if own else 2)
            assert run_one(runtime, prompt, SAMPLED) == tokens


@pytest.mark.second
def test_a_draft_model_with_the_target_s_own_window_keeps_all_of_its_keys(tmp_path: Path) -> None:
    """As z-lab's of Gemma 4: Qwen3's layers, four of five with windows, six captured streams, capped logits."""
    target, prompt = make_target(tmp_path / "target", "gemma4_text", num_hidden_layers=4), prompt_of(60)
    window = target.config.sliding_window
    form: dict[str, Any] = {
        "windows": (window, window, None),
        "num_hidden_layers": 3,
        "softcap": 30.0,
        "captures": (1, 1, 2, 2, 3, 3),
    }
    dflash_draft_model(tmp_path / "draft", target, **form)
    with Runtime.load(tmp_path / "target", **OPTIONS) as runtime:
        tokens = run_one(runtime, prompt, SAMPLED)
    draft = SpeculativeConfig(tmp_path / "draft", "auto", num_speculative_tokens=5, strict=True)
    with Runtime.load(tmp_path / "target", draft, **OPTIONS) as runtime:
        assert run_one(runtime, prompt, SAMPLED) == tokens
        assert runtime.speculator is not None and runtime.speculator.method == "dflash"
        program = runtime.executor.program(runtime.ladder.choose(1, 5))
        reads = [
            op.reads for op in program.ops if op.kind == "attention" and op.reads["k_cache"].startswith("draft_model.")
        ]
        assert [each["block_table"] for each in reads] == ["block_table"] * 3
        shapes = {program.buffers[each["k_cache"]].shape[0] for each in reads}
        assert shapes == {runtime.geometry.num_blocks}
        windows = [op.params["window"] for op in program.ops if op.kind == "attention"][-3:]
        assert windows == [window, window, None]


@pytest.mark.parametrize("options", [wide({"num_key_value_heads": 4}), wide({**MOE, **CUT}), wide({**E2B, **CUT})])
def test_the_number_of_ranks_changes_no_bit(options: dict[str, Any], tmp_path: Path) -> None:
    """With keys as values, shared keys, and fewer of them than ranks; experts next to a dense FFN."""
    make_target(tmp_path, "gemma4_text", **{**CUT, **options})
    found = []
    for size in (1, 4):
        with Runtime.load(tmp_path, NGRAM, tensor_parallel_size=size, tp_invariant=True, **OPTIONS) as runtime:
            found.append(traced(runtime, prompt_of(25), SAMPLED))
    assert_same(*found)


@pytest.mark.parametrize(
    "options", [wide({"quantize": "fp8"}), later({"kv_cache_dtype": "fp8"}), wide({"quantize": "int4"})]
)
def test_formats_lose_no_token_to_drafts(options: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
    make_target(
        tmp_path, "gemma4_text", **{**MOE, **sizes, "hidden_size_per_layer_input": 32}, vocab_size_per_layer_input=97
    )
    found = []
    for draft in (None, NGRAM):
        with Runtime.load(tmp_path, draft, **{**OPTIONS, "dtype": "bfloat16"}, **options) as runtime:
            found.append([run_one(runtime, prompt_of(4) * 6, SAMPLED), run_one(runtime, prompt_of(49), SAMPLED)])
    assert found[0] == found[1]


def wrap(directory: Path, family: str, stem: str, **more: torch.Tensor) -> None:
    """Make a text model's files those of a model that sees."""
    text = json.loads((directory / "config.json").read_text())
    text.pop("architectures")
    name = {"gemma3": "Gemma3", "gemma4": "Gemma4"}[family]
    config = {"model_type": family, "architectures": [f"{name}ForConditionalGeneration"], "text_config": text} | {
        "vision_config": {"hidden_size": 8},
        "image_token_id": 90,
        "boi_token_index": 91,
    }
    stored = load_file(directory / "model.safetensors")
    renamed = {f"{stem}.{key.removeprefix('model.')}": value for key, value in stored.items()}
    save_file({**renamed, **more}, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("gemma-3-1b", "language_model.model"),
        ("gemma-3-1b", "model.language_model"),
        ("gemma-4-e2b", "model.language_model"),
    ],
)
def test_files_of_models_that_see_give_the_same_weights(name: str, stem: str, tmp_path: Path) -> None:
    """The vision tower's weights are skipped, and so are keys and values of layers that read another layer's."""
    family, options = CASES[name]
    make_target(tmp_path, family, **options)
    plain = load_target(tmp_path)
    more = {"model.vision_tower.x.weight": torch.ones(4), f"{stem}.layers.5.self_attn.k_proj.weight": torch.ones(8, 32)}
    wrap(tmp_path, family.removesuffix("_text"), stem, **(more if name.startswith("gemma-4") else {}))
    found = load_target(tmp_path)
    assert found.config.layers == plain.config.layers and found.weights.keys() == plain.weights.keys()
    assert all(torch.equal(found.weights[key], weight) for key, weight in plain.weights.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "each token sees those before it alone"),
        ({"attention_bias": True}, "attention without biases"),
        ({"hidden_activation": "silu"}, "only GELU's tanh formula"),
        ({"vocab_size_per_layer_input": 96}, "vocab_size_per_layer_input 96 is not implemented"),
        ({"num_kv_shared_layers": 5}, "leaves no layer of full_attention"),
        ({"some_new_switch": True}, "is not a key that lowlat knows"),
        ({"enable_moe_block": True}, "needs num_experts"),
    ],
)
def test_keys_that_change_logits_are_refused_by_name(changes: Mapping[str, Any], message: str, tmp_path: Path) -> None:
    make_target(tmp_path, "gemma4_text", **E2B)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        open_target(tmp_path)


def test_keys_of_older_files_mean_the_same(tmp_path: Path) -> None:
    """Gemma 3's RoPE and windows, Gemma 4's heads, in either spelling; the plan of weights lists what files give."""
    for family, options, old in (
        (
            "gemma3_text",
            GEMMA_3_27B,
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
            | {"rope_parameters": None, "layer_types": None, "sliding_window_pattern": 3},
        ),
        ("gemma4_text", E2B, {"per_layer_config": None, "global_head_dim": 16, "num_global_key_value_heads": None}),
    ):
        make_target(tmp_path / family, family, **options)
        opened = open_target(tmp_path / family, dtype="float32")
        plan = weight_plan(opened.config)
        found = {name: (tuple(x.shape), x.dtype) for name, x in opened.weights.loaded().items()}
        assert found.pop("lm_head.weight") == found["embed.weight"] and found == dict(plan)
        path = tmp_path / family / "config.json"
        fields = json.loads(path.read_text()) | old
        path.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))
        assert open_target(tmp_path / family, dtype="float32").config == opened.config
