"""Draft models of every method against plain torch from the papers' equations, fed with transformers' features."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from paper_draft_model import PaperDraftModel
from recording import check_invariants, prompt_of, run_all, run_one
from stages import later, staged, wide
from tiny_dflash import PaperDflash, PaperDspark, dflash_draft_model
from tiny_models import make_target, random_draft_model, residual_streams
from tiny_mtp import PaperMtp, add_mtp

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.step.variants import first_token_bucket

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
TOLERANCE = 1e-4
MAX_TOKENS = 20
TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 1, 1))
OPTIONS: dict[str, Any] = {"max_batch": 1, "max_context": 128, "block_size": 4, "prefill_chunk": 8} | {
    "device": "cpu",
    "dtype": "float32",
}
# how many drafts of each step are replaced by the true continuation: every length of acceptance occurs
PLANTED = (0, 2, 1, 3, 0, 1, 2, 0, 3, 1)

FLAGS: dict[str, Mapping[str, Any]] = {
    "plain": {},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "both-residual-and-output": {"norm_before_residual": True, "norm_output": True},
    "eagle-3.1": {"fc_norm": True, "norm_output": True},
    "norms-before-fc": {"norm_before_fc": True, "norm_before_residual": True},
    "own-embedding": {"own_embedding": True},
    "other-width": {"hidden_size": 24, "own_embedding": True, "head_dim": 10},
    "qk-norm": {"qk_norm": True, "num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "target-lm-head": {"own_lm_head": False},
    "d2t": {"draft_vocab_size": 41},
    "d2t-other-width": {"draft_vocab_size": 33, "hidden_size": 20, "own_embedding": True},
    "one-kv-head": {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 12},
    "rope-theta": {"rope_theta": 500.0},
    "adjacent-captures": {"captures": (0, 1, 2)},
    "repeated-captures": {"captures": (3, 3, 3)},
    "five-captures": {"captures": (0, 1, 1, 2, 3), "fc_norm": True},
    "two-layers": {"num_hidden_layers": 2},
    "three-layers": (
        {"num_hidden_layers": 3, "qk_norm": True, "mlp_bias": True, "norm_before_residual": True}
        | {"hidden_size": 24, "own_embedding": True, "norm_output": True}
    ),
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "window": {"windows": (5,)},
    "yarn": {"rope_scaling": YARN},
    "yarn-window": {"rope_scaling": {**YARN, "truncate": False}, "windows": (9,)},
    "two-layers-one-window": {"num_hidden_layers": 2, "windows": (None, 6), "attention_bias": True},
    "two-windows": {"num_hidden_layers": 2, "windows": (7, 7)},
    "no-features": {"final_hidden": True},
    "no-features-three-layers": {"final_hidden": True, "num_hidden_layers": 3, "norm_output": True},
    "p-eagle": {"mask_token": 7},
    "p-eagle-four-layers": (
        {
            "mask_token": 96,
            "num_hidden_layers": 4,
            "norm_before_fc": True,
            "own_embedding": True,
            "attention_bias": True,
        }
        | {"draft_vocab_size": 50, "hidden_size": 24, "norm_before_residual": True}
    ),
    "p-eagle-window": {"mask_token": 0, "num_hidden_layers": 2, "windows": (None, 6), "fc_norm": True, "qk_norm": True},
    "dflash": {"layout": "z-lab"},
    "dflash-speculators": (
        {"layout": "speculators", "num_hidden_layers": 3, "draft_vocab_size": 40, "own_lm_head": True}
        | {"own_embedding": True, "hidden_size": 24, "captures": (0, 1, 2, 3), "attention_bias": True}
    ),
    "dflash-one-layer": {"layout": "z-lab", "num_hidden_layers": 1, "qk_norm": False, "num_key_value_heads": 1},
    "dflash-from-the-anchor": {"layout": "speculators", "anchor": True, "hidden_act": "gelu_pytorch_tanh"},
    "dflash-windows": (
        {"layout": "z-lab", "num_hidden_layers": 3, "windows": (6, None, 6), "softcap": 2.0, "embedding_scale": 1.7}
        | {"captures": (1, 1, 2, 2, 1, 2)}
    ),
    "dflash-two-way-windows": {"layout": "z-lab", "windows": (7, 7), "causal": False},
    "dflash-causal": {"layout": "speculators", "windows": (9, None), "causal": True},
    "dflash2": {"layout": "z-lab", "windows": (8, 8), "causal": False, "conv": (2, 8), "selector": (16, 6)},
    "dflash2-speculators": (
        {"layout": "speculators", "own_lm_head": True, "own_embedding": True, "hidden_size": 24, "conv": (3, 4)}
        | {"selector": (8, 16), "block_size": 6, "draft_vocab_size": 40}
    ),
    "dspark": {"layout": "deepspec", "own_embedding": True, "own_lm_head": True, "markov_rank": 8},
    "dspark-gated": (
        {"layout": "speculators", "draft_vocab_size": 40, "own_lm_head": True, "own_embedding": True, "markov_rank": 12}
        | {"hidden_size": 24, "captures": (0, 1, 3), "markov_head_type": "gated", "confidence": "states"}
    ),
    "dspark-from-masks": {"layout": "speculators", "markov_rank": 4, "anchor": False, "confidence": ""},
    "dspark-without-bias": {"layout": "deepspec", "captures": (0, 2), "markov_rank": 0, "confidence": "states"},
    "all-at-once": (
        {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True, "qk_norm": True}
        | {"draft_vocab_size": 50, "hidden_size": 24, "own_embedding": True}
    ),
}


class Pair:
    """A random target and head on disk, with the plain implementation of both."""

    def __init__(self, path: Path, family: str, window: int | None = None, **flags: Any) -> None:
        self.target_dir, self.head_dir, self.window = path / "target", path / "head", window
        self.model = make_target(self.target_dir, family, seed=5)
        if "layout" in flags:
            config, tensors = dflash_draft_model(self.head_dir, self.model, seed=6, **flags)
            made = PaperDspark if "markov_rank" in flags else PaperDflash
            self.paper: PaperDraftModel = made(config, tensors, self.model)
            self.captures = config["aux_hidden_state_layer_ids"]
        else:
            config, tensors = random_draft_model(self.head_dir, self.model, seed=6, **flags)
            self.paper = PaperDraftModel(config, tensors, self.model, window)
            self.captures = config["eagle_aux_hidden_state_layer_ids"] or [self.model.config.num_hidden_layers]
        self.method = config["speculators_model_type"]

    def load(self, depth: int, **speculative: Any) -> Runtime:
        """A runtime that speculates; a head that does not load is an error."""
        config = SpeculativeConfig(
            method=self.method,
            model=self.head_dir,
            num_speculative_tokens=depth,
            draft_window=self.window,
            strict=True,
            **speculative,
        )
        return Runtime.load(self.target_dir, config, **OPTIONS)

    def features(self, tokens: Sequence[int]) -> torch.Tensor:
        """The fc of the target's true features of all tokens but the last, [n, H]."""
        streams = residual_streams(self.model, list(tokens[:-1]))
        return self.paper.features([streams[boundary] for boundary in self.captures])


class MtpPair(Pair):
    """A random hybrid with an MTP layer in its files, and the plain implementation of the layer."""

    def __init__(self, path: Path, family: str, *, by_expert: bool = False) -> None:
        self.target_dir, self.window, self.method = path, None, "mtp"
        self.model = make_target(path, family, seed=5)
        self.paper: Any = PaperMtp(add_mtp(path, seed=6, by_expert=by_expert), self.model)
        self.captures = [self.model.config.num_hidden_layers]

    def load(self, depth: int, **speculative: Any) -> Runtime:
        """A runtime that drafts with the layer."""
        config = SpeculativeConfig(method="mtp", num_speculative_tokens=depth, strict=True, **speculative)
        return Runtime.load(self.target_dir, config, **OPTIONS)


def check_drafts(pair: Pair, runtime: Runtime, tokens: list[int], depth: int, first: bool) -> None:
    """The request's last drafts, by a step or after its first token, equal the paper's chain, and so
    do its logits."""
    state = runtime.executor.state
    slot = int(state["active"].nonzero())
    assert int(state["num_drafts"][slot]) == depth
    drafts = state["drafts"][slot, 1 : depth + 1].tolist()
    features = pair.features(tokens)
    assert drafts == pair.paper.draft_chain(tokens, features, depth)
    expected = pair.paper.draft_logits(tokens, features, drafts[:-1])
    scratch = runtime.executor.scratch(first_token_bucket(depth) if first else runtime.ladder.choose(1, depth))
    rank = pair.method == "dspark" and pair.paper.config["heads"]["markov_rank"]
    name = "draft.0.level.{}.logits" if rank else "draft.{}.logits"
    if rank or pair.method in ("eagle3", "mtp"):
        found = torch.stack([scratch[name.format(level)][0] for level in range(depth)])
    else:
        first_row = int(not pair.paper.config.get("sample_from_anchor", True))
        found = scratch["draft.0.logits"][first_row : first_row + depth]
    difference = (found - expected).abs().amax() / expected.abs().amax()
    assert difference < TOLERANCE, f"relative difference {difference:.2e}"


def plant(runtime: Runtime, continuation: Sequence[int], count: int) -> None:
    """Replace the first drafts of the only request by its true continuation, so that they are accepted."""
    drafts = runtime.executor.state["drafts"]
    slot = int(runtime.executor.state["active"].nonzero())
    drafts[slot, 1 : count + 1] = torch.tensor(continuation[:count], dtype=drafts.dtype)


def drive(pair: Pair, runtime: Runtime, prompt: list[int], truth: list[int], depths: Sequence[int]) -> list[int]:
    """Decode one request, checking every step's drafts; returns how many drafts each step accepted."""
    name = runtime.submit(prompt, SamplingParams(max_tokens=MAX_TOKENS))
    tokens, accepted, number = list(prompt), [], 0
    while runtime.busy:
        depth = depths[number % len(depths)]
        outputs = runtime.step(depth)
        if not outputs:
            continue  # prefill
        (output,) = outputs
        tokens += output.token_ids
        accepted.append(len(output.token_ids) - 1)
        number += 1
        if output.finish_reason is None and depth:
            check_drafts(pair, runtime, tokens, depth, number == 1)
            done = len(tokens) - len(prompt)
            plant(runtime, truth[done:], min(PLANTED[number % len(PLANTED)], depth, MAX_TOKENS - done))
    check_invariants(runtime)
    assert tokens == prompt + truth, name
    return accepted


# what others have next to more, or other tests here alone
MET_ELSEWHERE = {
    *("fc_norm", "norm_output", "norm_before_residual", "own-embedding", "d2t", "two-layers", "window"),
    *("no-features", "p-eagle", "dflash", "dspark"),
}
NUMBERED = [(name, ("llama", "gpt_oss")[number % 2]) for number, name in enumerate(FLAGS)]
PLAINEST = [case for number, case in enumerate(NUMBERED) if number % 8 == 0]


@pytest.mark.parametrize(
    ("name", "family"),
    staged(
        [case for case in NUMBERED if case in PLAINEST or case[0] not in MET_ELSEWHERE],
        first=PLAINEST[::2],
        second=[*PLAINEST, *NUMBERED[4::16]],
    ),
)
def test_drafts_equal_the_paper_after_every_acceptance(name: str, family: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, family, **FLAGS[name])
    prompt = prompt_of(21)
    with pair.load(3) as runtime:
        truth = run_one(runtime, prompt_of(21), SamplingParams(max_tokens=MAX_TOKENS), depth=0)
        accepted = drive(pair, runtime, prompt, truth, depths=[3])  # its prefix is reused
    assert set(accepted) >= {0, 1, 2, 3}


@pytest.mark.second
@pytest.mark.parametrize(
    ("family", "by_expert"),
    [
        ("qwen3_5_moe_text", True),
        *(wide(family, False) for family in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")),
    ],
)
def test_an_mtp_layers_drafts_equal_its_equations(family: str, by_expert: bool, tmp_path: Path) -> None:
    """After prompts that end within a chunk, every length of acceptance, and steps without drafts."""
    pair = MtpPair(tmp_path, family, by_expert=by_expert)
    prompt = prompt_of(21)
    with pair.load(7) as runtime:
        truth = run_one(runtime, prompt, SamplingParams(max_tokens=MAX_TOKENS), depth=0)
        accepted = drive(pair, runtime, prompt, truth, depths=[3, 3, 0, 3, 3, 7])
    assert set(accepted) >= {0, 1, 2}


@pytest.mark.parametrize(
    ("length", "flags"),
    [
        wide(1, {"num_hidden_layers": 2}),
        *(wide(length, {"num_hidden_layers": layers}) for length, layers in ((8, 2), (9, 1))),
        (33, {"num_hidden_layers": 2}),
        *(wide(length, {"mask_token": 5, "num_hidden_layers": length % 3 + 1}) for length in (1, 10)),
        later(8, {"layout": "z-lab"}),
        later(1, {"layout": "deepspec", "markov_rank": 8}),
    ],
    ids=str,
)
def test_drafts_equal_the_paper_at_every_length_of_prompt(length: int, flags: dict[str, Any], tmp_path: Path) -> None:
    """One token, whole chunks, one more and one less than a chunk."""
    pair = Pair(tmp_path, "qwen3", **flags)
    prompt = prompt_of(length, seed=length)
    with pair.load(2) as runtime:
        runtime.submit(prompt, SamplingParams(max_tokens=MAX_TOKENS, seed=1))
        cold = next(iter(run_all(runtime, depth=2).values()))
        drive(pair, runtime, prompt, cold, depths=[2])


@pytest.mark.parametrize(
    ("depths", "layers", "flags"),
    [
        wide((3, 0, 0, 2, 0, 5), 1, {"fc_norm": True}),
        wide((0, 7), 1, {"mask_token": 3}),
        wide((3, 0, 0, 2, 0, 5), 1, {"layout": "z-lab"}),
        ((1, 4, 2, 0), 2, {"layout": "deepspec", "markov_rank": 4}),
    ],
    ids=str,
)
@pytest.mark.second
def test_drafts_equal_the_paper_when_the_depth_changes(
    depths: tuple[int, ...], layers: int, flags: dict[str, Any], tmp_path: Path
) -> None:
    """Steps without speculation extend the head's KV as well, so drafts after them are as good as ever."""
    pair = Pair(tmp_path, "llama", num_hidden_layers=layers, **flags)
    prompt = prompt_of(11)
    with pair.load(7) as runtime:
        truth = run_one(runtime, prompt, SamplingParams(max_tokens=MAX_TOKENS), depth=0)
        drive(pair, runtime, prompt, truth, depths)


@pytest.mark.parametrize(("window", "own"), [wide(1, None), (7, None), wide(3, (7,)), wide(16, (7, 7)), (6, (9, None))])
@pytest.mark.second
def test_a_draft_window_keeps_the_first_rows_and_the_last(window: int, own: Any, tmp_path: Path) -> None:
    """Where a layer has a window of its own, the smaller holds, and no first row is kept."""
    pair = Pair(tmp_path, "llama", window=window, **({"windows": own, "num_hidden_layers": len(own)} if own else {}))
    prompt = prompt_of(30)
    with pair.load(3) as runtime:
        truth = run_one(runtime, prompt, SamplingParams(max_tokens=MAX_TOKENS), depth=0)
        drive(pair, runtime, prompt, truth, depths=[3])
    pair.paper.window = None
    features = pair.features(prompt)
    plain = pair.paper.draft_logits(prompt, features, ())
    pair.paper.window = window
    same = torch.allclose(plain, pair.paper.draft_logits(prompt, features, ()))
    assert same == (own == (7, 7))


def test_capture_layers_override_those_of_the_head(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "llama")
    pair.captures = [1, 1, 3]
    prompt = prompt_of(12)
    with pair.load(3, capture_layers=(1, 1, 3)) as runtime:
        truth = run_one(runtime, prompt, SamplingParams(max_tokens=MAX_TOKENS), depth=0)
        drive(pair, runtime, prompt, truth, depths=[3])


@pytest.mark.parametrize(
    "name", ["d2t", "dspark-gated", *map(wide, ("norm_output", "two-layers-one-window", "p-eagle-four-layers"))]
)
@pytest.mark.second
def test_a_trees_nodes_are_the_papers_likeliest_children(name: str, tmp_path: Path) -> None:
    """Node (0, 1) is the second likeliest token after the likeliest: by the paper, along each path on its own."""
    pair = Pair(tmp_path, "llama", **FLAGS[name])
    prompt = prompt_of(14)
    with pair.load(3, tree=TREE) as runtime:
        truth = run_one(runtime, prompt, SamplingParams(max_tokens=MAX_TOKENS), depth=0)
        runtime.submit(prompt, SamplingParams(max_tokens=MAX_TOKENS))
        tokens, count = list(prompt), 0
        while runtime.busy:
            outputs = runtime.step(3)
            tokens += [token for output in outputs for token in output.token_ids]
            if not outputs or outputs[0].finish_reason:
                continue
            drafted = check_tree(pair, runtime, tokens)
            done, rows = len(tokens) - len(prompt), runtime.executor.state["drafts"]
            if count % 2 and len(truth) > done + 1:  # the second child of the root, and its likeliest child
                rows[0, drafted.index((1,)) + 1] = truth[done]
                rows[0, drafted.index((1, 0)) + 1] = truth[done + 1]
            count += 1
        assert tokens == prompt + truth


def check_tree(pair: Pair, runtime: Runtime, tokens: list[int]) -> list[tuple[int, ...]]:
    """Every drafted node against the paper; returns the paths in order of nodes."""
    paths = sorted(TREE, key=lambda path: (len(path), path))
    state, features = runtime.executor.state, pair.features(tokens)
    found = dict(zip(paths, state["drafts"][0, 1 : len(paths) + 1].tolist(), strict=True))
    assert int(state["num_drafts"][0]) == len(paths)
    for path in paths:
        above = [found[path[:depth]] for depth in range(1, len(path))]
        padded = [*above, 0, 0][:2]  # a block is as long as the tree is deep
        logits = pair.paper.draft_logits(tokens, features, padded)[len(above)]
        assert found[path] == pair.paper.target_ids(logits, path[-1] + 1)[-1], path
    return paths
