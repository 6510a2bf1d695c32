"""Pairs of a target and a head in which something is particular, by name, and what their programs lower to."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lowered import Lowered, Pair
from quantised_layers import quantise_target
from tiny_dflash import dflash_draft_model
from tiny_models import make_pair, make_target, mxfp4_target, random_draft_model

from lowlat.graphs.program import Op, Stage
from lowlat.kernels.toolchain.kernel import H200, KernelCall
from lowlat.lowering import operations
from lowlat.lowering.binding import Binding
from lowlat.lowering.fusion import cover
from lowlat.lowering.lower import FUSIONS

# attention's first launch: sinks, read early, but for the rows, whole
ATTENTION = re.compile(r"attention_\d.*_\d+x\d+x\d+(s?)(e?)(r?)w?\dx\d+(_.*)?")
# the rule's launch that reads lengths and states early
RULE = re.compile(r"gated_delta_\d.*_True")
DEMO = Path(__file__).parents[2] / "lowlat" / "demo"
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64}
TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0))
SHAPES: dict[bool | str, dict[str, Any]] = {
    False: {},
    True: {"num_speculative_tokens": 3, "tree": TREE},
    "dynamic": {"num_speculative_tokens": 3, "dynamic_tree_max_topk": 4, "max_total_draft_tokens": 9},
}
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "qk_norm": {"qk_norm": True, "num_key_value_heads": 1},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "own_embedding": {"own_embedding": True},
    "small_vocabulary": {"draft_vocab_size": 40},
    "target_s_lm_head": {"own_lm_head": False},
    "five_captures": {"captures": (0, 1, 1, 2, 2)},
    "no_features": {"final_hidden": True},
    "several_layers": {"num_hidden_layers": 3, "windows": (None, 96, 96)},
    "parallel": {"mask_token": 5, "num_hidden_layers": 2},
    "dflash": {"layout": "z-lab", "captures": (1,)},
    "dflash_windows": {"layout": "z-lab", "captures": (1,) * 6, "windows": (96, None)},
    "dflash2": {"layout": "z-lab", "captures": (1,), "windows": (96, 96), "causal": False}
    | {"conv": (2, 16), "selector": (16, 8)},
    "dflash_alone": {"layout": "speculators", "own_embedding": True, "own_lm_head": True, "attention_bias": True},
    "dspark": (
        {"layout": "deepspec", "own_embedding": True, "own_lm_head": True, "markov_rank": 16, "num_hidden_layers": 1}
        | {"markov_head_type": "gated", "captures": (0, 1)}
    ),
    "everything": dict.fromkeys(
        ("norm_before_fc", "fc_norm", "norm_output", "qk_norm", "attention_bias", "mlp_bias", "own_embedding"), True
    ),
}
WHOLE = "whole"  # the draft model is a model of its own family
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "one_group": ("qwen3", {"num_key_value_heads": 1}),
    "llama_fp8": ("llama", {}),
    "llama_codes": ("llama", {}),
    "qwen3_codes": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {"num_local_experts": 20, "num_experts_per_tok": 8}),
    "qwen3_moe_fp8": ("qwen3_moe", {"num_local_experts": 9, "num_experts_per_tok": 8, "norm_topk_prob": False}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 6, "num_experts_per_tok": 3}),
    "gpt_oss_mxfp4": ("gpt_oss", {"num_local_experts": 37, "num_experts_per_tok": 4, "sliding_window": 300}),
}
MOE_LAYERS = ("gpt_oss", "gpt_oss_mxfp4")


class LoweredPairs:
    """Lowers a bucket of a pair by name; files, pairs and lowered programs are made once."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._files: dict[str, tuple[Path, Path | None]] = {}
        self._pairs: dict[Any, Pair] = {}
        self._made: dict[Any, Lowered] = {}

    def __call__(
        self, name: str, depth: int, batch: int, tree: bool | str = False, gpu: Any = H200, **speculation: Any
    ) -> Lowered:
        """A bucket's program, lowered."""
        key = (name, depth, batch, tree, gpu, *speculation.items())
        if key not in self._made:
            self._made[key] = self.pair(name, tree, **speculation).lower(depth, batch, gpu)
        return self._made[key]

    def pair(self, name: str, tree: bool | str = False, **speculation: Any) -> Pair:
        """A pair by name."""
        key = (name, tree, *speculation.items())
        if key not in self._pairs:
            if name not in self._files:
                self._files[name] = write_pair(name, self._factory.mktemp(name))
            own = {**SHAPES[tree], **speculation, "codes": "codes" in name}
            self._pairs[key] = Pair(*self._files[name], **own)
        return self._pairs[key]


def write_pair(name: str, directory: Path) -> tuple[Path, Path | None]:
    """The files of a pair: the bundled one, a target with a head that copies it, or one with a random head."""
    if name == "demo":
        return DEMO / "target", DEMO / "head"
    kind, _, flags = name.partition("+")
    family_name, options = TARGETS[kind]
    make = mxfp4_target if kind.endswith("mxfp4") else partial(make_target, family=family_name)
    if flags == "alone":
        make(directory / "target", num_hidden_layers=2, **SIZES, **options)
        _quantise(kind, directory / "target")
        return directory / "target", None
    if not flags:
        paths = make_pair(directory, family_name, **SIZES, **options)
        _quantise(kind, paths.target)
        return paths.target, paths.head
    target = make(directory / "target", num_hidden_layers=2, **SIZES, **options)
    _quantise(kind, directory / "target")
    if flags == WHOLE:
        small = {"num_hidden_layers": 2, "hidden_size": 32, "head_dim": 64, "intermediate_size": 64}
        make_target(directory / "head", "qwen3", seed=1, tie_word_embeddings=True, **small)
        return directory / "target", directory / "head"
    shape = {"hidden_size": 64, "head_dim": 64, "intermediate_size": 96, "captures": (0, 1, 2)}
    make_head = dflash_draft_model if "layout" in HEADS[flags] else random_draft_model
    make_head(directory / "head", target, **{**shape, **HEADS[flags]})
    return directory / "target", directory / "head"


def _quantise(kind: str, target: Path) -> None:
    if kind.endswith("fp8"):
        quantise_target(target, "fp8-channel", None)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of its first byte and of the one after its last."""
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()


def reached(calls: tuple[KernelCall, ...], tensor: torch.Tensor) -> bool:
    """Whether an argument of the calls overlaps the tensor."""
    low, high = span(tensor)
    spans = (span(a) for call in calls for a in call.arguments if isinstance(a, torch.Tensor) and a.numel())
    return any(start < high and low < end for start, end in spans)


def check_savings(made: Lowered) -> set[str]:
    """Each fused run has as many launches fewer than its operations alone as its fusion says; returns their names."""
    binding = Binding(made.program, made.buffers, made.weights, H200, made.workspace)
    groups, found = iter(made.groups), set()
    for fusion, run in cover(made.program, H200, FUSIONS, made.weights.permutation):
        group = next(groups)
        if fusion is not None:
            alone = sum(len(operations.lower_alone(binding, op)) for op in run.ops)
            assert alone - len(group.calls) >= fusion.saves, fusion.name
            found.add(fusion.name)
    return found


def kinds_of(step: Lowered, *stages: Stage) -> list[str]:
    """The kernels of some stages, by the part of their names before the sizes."""
    names = (call.kernel.name for group in step.groups if group.stage in stages for call in group.kernel_calls)
    return [re.split(r"_\d|_[a-z]\d", name)[0] for name in names]


def check_early_reads(step: Lowered) -> None:
    """Before a kernel waits, what was launched before the last one that awaited all, or settled it, is done."""
    under_way: list[Op] = []
    for group in step.groups:
        calls = group.kernel_calls
        under_way = under_way if calls[0].dependent else []
        for op in group.ops:
            early = {name: op.reads[name] for name in _read_early(op, calls[0].kernel.name) if name in op.reads}
            caches = {op.reads[name] for name in ("k_cache", "v_cache") if early and name in op.reads}
            for before in under_way:
                writes = {*before.writes.values()}
                assert writes.isdisjoint(early.values()), f"{op.kind} reads what {before.kind} writes"
                behind = before.reads.get("write_lens")
                assert writes.isdisjoint(caches) or behind == op.reads["dense_lens"], f"{before.kind} writes keys"
        under_way = [*([] if any(call.kernel.waits_before_trigger for call in calls) else under_way), *group.ops]
    names = [call.kernel.name for call in step.calls if call.kernel.name.startswith("attention_")]
    alone = [name for name in names if not name.startswith("attention_combine")]
    assert all(ATTENTION.fullmatch(name) for name in alone)


def _read_early(op: Op, kernel: str) -> tuple[str, ...]:
    """The arguments that an operation's first kernel reads before it waits; attention's name says which."""
    found = ATTENTION.fullmatch(kernel)
    if op.kind in ("delta_conv", "delta_rule") and RULE.fullmatch(kernel):
        return ("slots", "dense_lens", "state_lens", "row_live")
    if op.kind not in ("attention", "partial_attention") or found is None:
        return operations.EARLY.get(op.kind, ())
    tables = ("slots", "block_table", "block_lists", "dense_lens")
    return () if not found[2] else tables if found[3] else (*tables, "row_live", "row_masks")
