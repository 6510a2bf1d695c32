"""Draft models of Gemma 4's layers against plain torch, over targets of other families and of their own."""

from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import edit_json
from recording import prompt_of, run_one
from stages import later, wide
from tiny_gemma_drafts import PaperGemmaDspark, PaperGemmaEagle3, gemma_draft_model
from tiny_models import make_target
from unit.test_parity_draft_model import MAX_TOKENS, OPTIONS, Pair, drive

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.errors import ConfigError
from lowlat.models.target import read_model_config
from lowlat.speculators.methods import draft_method, plan_speculator

EAGLE3, DFLASH, DSPARK = {"block": False}, {"block": True, "layers": 2}, {"block": True, "rank": 6}
APART = {"keys_as_values": False}


class GemmaPair(Pair):
    """A random target and draft model on disk, with the plain implementation of both."""

    def __init__(self, path: Path, family: str, **flags: Any) -> None:
        self.target_dir, self.head_dir, self.window = path / "target", path / "head", None
        self.model = make_target(self.target_dir, family, seed=5)
        config, tensors = gemma_draft_model(self.head_dir, self.model, **flags)
        self.paper = (PaperGemmaDspark if flags["block"] else PaperGemmaEagle3)(config, tensors, self.model)
        self.paper.scale_embedding()
        self.captures = config["aux_hidden_state_layer_ids"]
        self.method = config["speculators_model_type"]


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        *(("qwen3", EAGLE3), ("gemma4_unified_text", {**EAGLE3, **APART})),
        *(("llama", DFLASH), later("qwen3", {**DFLASH, **APART}), ("gemma4_unified_text", DSPARK)),
    ],
    ids=str,
)
def test_drafts_equal_the_equations_after_every_acceptance(family: str, flags: dict[str, Any], tmp_path: Path) -> None:
    pair, prompt = GemmaPair(tmp_path, family, **flags), prompt_of(21)
    assert draft_method(pair.head_dir) == pair.method
    with pair.load(3) as runtime:
        truth = run_one(runtime, prompt, SamplingParams(max_tokens=MAX_TOKENS), depth=0)
        accepted = drive(pair, runtime, prompt, truth, depths=[3])
    assert set(accepted) >= {0, 1, 2, 3}


@pytest.mark.second
@pytest.mark.parametrize("flags", [wide(EAGLE3), DFLASH, wide({**DSPARK, **APART})], ids=str)
def test_ranks_share_out_the_heads_of_such_layers(flags: dict[str, Any], tmp_path: Path) -> None:
    """Of keys that are values, too, in fewer heads than there are ranks; drafts are those of one rank."""
    pair, found = GemmaPair(tmp_path, "qwen3", **flags), []
    own: dict[str, Any] = {"num_speculative_tokens": 3, "strict": True, "draft_tensor_parallel_size": None}
    draft = SpeculativeConfig(method=pair.method, model=pair.head_dir, **own)
    for size in (1, 2):
        options = {**OPTIONS, "tensor_parallel_size": size, "tp_invariant": True}
        with Runtime.load(pair.target_dir, draft, **options) as runtime:
            tokens = run_one(runtime, prompt_of(21), SamplingParams(max_tokens=8), depth=3)
            found.append(
                (
                    tokens,
                    runtime.summary()["eagle_speculation"]["total_accepted_tokens"],
                    runtime.executor.state["drafts"].tolist(),
                )
            )
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layer_types": ["sliding_attention"]}, "layer_types entry 'sliding_attention' is not implemented for draft"),
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input 8 is not implemented for draft models"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"unknown_key": 3}, "unknown_key"),
    ],
)
@pytest.mark.parametrize("block", [False, True])
def test_what_draft_models_cannot_have_is_named(
    changes: dict[str, Any], problem: str, block: bool, tmp_path: Path
) -> None:
    gemma_draft_model(tmp_path / "head", make_target(tmp_path / "target", "qwen3"), block=block)
    edit_json(tmp_path / "head" / "config.json", **changes)
    options = SpeculativeConfig(method="auto", model=tmp_path / "head", num_speculative_tokens=3)
    with pytest.raises(ConfigError, match=problem):
        plan_speculator(options, read_model_config(tmp_path / "target"))
