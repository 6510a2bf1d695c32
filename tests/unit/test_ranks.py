"""Targets cut for several GPUs: the bits of any number of them, the parts of weights, and what cannot be cut."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_changes import with_changes
from quantised_layers import random_parts
from stages import later, wide
from tiny_models import copying_draft_model, make_target, mxfp4_target, random_draft_model

import lowlat
from lowlat.checkpoint.quantising import Quantiser
from lowlat.cli.reports.models import model_report
from lowlat.executors.reference.ranks import RankedReferenceExecutor
from lowlat.graphs.program import Op
from lowlat.kernels.formats import MATRIX_FORMATS, matrix_format
from lowlat.kernels.reference.collectives.cuts import bounds, tree_sum
from lowlat.models.rank_weights import rank_weights
from lowlat.models.shard import rank_configs
from lowlat.models.target import read_model_config

SIZES: dict[str, Any] = {"num_attention_heads": 8, "head_dim": 16, "num_hidden_layers": 2, "intermediate_size": 96}
SHAPES: dict[str, Any] = {"max_batch": 2, "max_context": 64, "prefill_chunk": 32, "block_size": 16, "device": "cpu"}
STATE = ("tokens", "lengths", "drafts", "block_table", "output_counts", "ring_tokens", "ring_records")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Targets of every kind of layer: experts, biases and sinks among them; and draft models of one of them."""
    folder = tmp_path_factory.mktemp("ranks")
    model = make_target(folder / "llama", "llama", gain=0.45, **SIZES)
    copying_draft_model(folder / "head", model, draft_vocab_size=80)
    cut = {**SIZES, "qk_norm": True, "draft_vocab_size": 80}
    random_draft_model(folder / "cut", model, **cut)
    random_draft_model(folder / "sharing", model, own_lm_head=False)
    odd = {"num_attention_heads": 15, "num_key_value_heads": 5}  # of 2 ranks one has 9 heads, one 6
    make_target(folder / "odd", "qwen3", **{**SIZES, **odd})
    make_target(folder / "tied", "qwen2", tie_word_embeddings=True, **SIZES)
    make_target(folder / "qwen3_moe", "qwen3_moe", **SIZES)
    # 9 blocks of 32: cuts are uneven
    mxfp4_target(folder / "mxfp4", **{**SIZES, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 288})
    return {path.name: path for path in folder.iterdir()}


class Decoded:
    """A decode by a runtime of so many ranks: tokens, and logits of every step."""

    def __init__(self, target: Path, size: int, head: Path | None = None, **options: Any) -> None:
        shape: Any = {"adaptive_width": True} if options.pop("adaptive", False) else {"tree": [[0], [1], [0, 0]]}
        draft = None if head is None else lowlat.SpeculativeConfig(model=head, num_speculative_tokens=2, **shape)
        self.logits: list[torch.Tensor] = []
        self.tokens: list[int] = []
        with lowlat.Runtime.load(target, draft, tensor_parallel_size=size, **SHAPES, **options) as runtime:
            runtime.executor.set_hook(self._keep)
            runtime.submit(list(range(1, 41)), lowlat.SamplingParams(max_tokens=6, temperature=0.7, seed=5))
            while runtime.busy:
                for output in runtime.step():
                    self.tokens += output.token_ids
            self.num_kv_heads = runtime.executor.state["k_cache.0"].shape[1]
            if size > 1:
                executor = runtime.executor
                assert isinstance(executor, RankedReferenceExecutor)
                for rank in range(size):
                    own = executor.peer_state(rank)
                    assert all(torch.equal(own[name], executor.state[name]) for name in STATE)
            drafted = runtime.executor.state.get("draft_model.k_cache")
            self.num_drafted_heads = 0 if drafted is None else drafted.shape[1]
            self.acceptance = acceptance = runtime.summary().get("eagle_speculation")
            assert draft is None or (acceptance is not None and acceptance["num_drafts"] > 0)

    def _keep(self, op: Op, arguments: Any) -> None:
        if op.kind == "sample":
            self.logits.append(arguments["logits"].clone())


@pytest.mark.second
@pytest.mark.parametrize(
    ("name", "head", "options"),
    [
        ("llama", "cut", {}),
        wide("llama", "head", {"adaptive": True}),
        wide("llama", "sharing", {}),
        later("tied", None, {"quantize": "fp8", "quantize_lm_head": True}),
        later("odd", None, {}),
        wide("qwen3_moe", None, {"kv_cache_dtype": "fp8"}),
        ("mxfp4", None, {}),
    ],
)  # fmt: skip
def test_the_number_of_ranks_changes_no_bit(
    name: str, head: str | None, options: Any, targets: dict[str, Path]
) -> None:
    """Tokens and logits of 1, 2, 4 and 8 ranks, where there are 2 heads of keys and values; drafts change none either.

    Where there are 5 groups of 3 heads there are no 8 ranks.
    """
    path, sizes = None if head is None else targets[head], (1, 2, 4) if name == "odd" else (1, 2, 4, 8)
    one, *others = (Decoded(targets[name], size, path, tp_invariant=True, **options) for size in sizes)
    for found in others:
        assert found.tokens == one.tokens
        if "adaptive" not in options:  # whose widths depend on what a rank's steps cost
            assert len(found.logits) == len(one.logits) and found.acceptance == one.acceptance
            assert all(map(torch.equal, found.logits, one.logits))
        assert head != "cut" or found.num_drafted_heads == 1
    assert others[0].num_kv_heads == (3 if name == "odd" else 1) and others[-1].num_kv_heads == 1 + (name == "odd")
    if head is not None:
        assert Decoded(targets[name], 2, tp_invariant=True).tokens == one.tokens


def test_ranks_that_sum_at_once_differ_by_rounding_alone(targets: dict[str, Path]) -> None:
    whole, halves = (Decoded(targets["mxfp4"], size) for size in (1, 2))
    first = whole.logits[0], halves.logits[0]
    assert not torch.equal(*first)
    torch.testing.assert_close(*first, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("total", "unit"), [(90, 1), (2880, 32), (97, 8), (8, 8)])
def test_a_part_is_cut_as_the_whole_is(total: int, unit: int) -> None:
    fine = bounds(total, 8, unit)
    assert fine[0] == 0 and fine[-1] == total and list(fine) == sorted(fine)
    assert all(end % unit == 0 for end in fine[:-1] if end != total)
    for size in (1, 2, 4):
        coarse = bounds(total, size, unit)
        assert coarse == fine[:: 8 // size]
        own = [start + end for start, stop in itertools.pairwise(coarse)
               for end in bounds(stop - start, 8 // size, unit)[1:]]  # fmt: skip
        assert (0, *own) == fine
    parts = torch.randn(8, 5)
    halves = torch.stack([tree_sum(list(parts[:4])), tree_sum(list(parts[4:]))])
    assert torch.equal(tree_sum(list(halves)), tree_sum(list(parts)))


@pytest.mark.parametrize("name", MATRIX_FORMATS)
def test_a_rank_has_its_numbers_of_a_matrix(name: str, targets: dict[str, Path]) -> None:
    """In every format: heads of queries, keys and values, and an inner width's rows and columns; MXFP4 has experts."""
    config = with_changes(read_model_config(targets["llama"]), head_dim=32, inner_size=512)
    owner, outer = ("layers.0.experts", (2,)) if name == "mxfp4" else ("layers.0", ())
    cuts = {
        "gate_up": (1024, 128, -2, [[(0, 256), (512, 768)], [(256, 512), (768, 1024)]]),
        "down": (64, 512, -1, [[(0, 256)], [(256, 512)]]),
        "qkv": (384, 128, -2, [[(0, 128), (256, 288), (320, 352)], [(128, 256), (288, 320), (352, 384)]]),
    }
    firsts = [[(start, start + 32) for start in range(32 * rank, 256, 64)] for rank in (0, 1)]
    cuts["context.kv"] = (256, 128, -2, firsts)  # of two layers
    if name == "mxfp4":
        del cuts["qkv"], cuts["context.kv"]
    for matrix, (rows, columns, axis, spans) in cuts.items():
        parts = random_parts(name, rows, columns, wide=True)
        parts = {part: tensor.expand(*outer, *tensor.shape) for part, tensor in parts.items()}
        whole = matrix_format(parts).dequantise(parts, torch.float32)
        given = {f"{owner}.{matrix}.{part}": tensor for part, tensor in parts.items()}
        for shard, own_spans in zip(rank_configs(config, 2), spans, strict=True):
            own = {key.rpartition(".")[2]: tensor for key, tensor in rank_weights(given, shard).items()}
            found = matrix_format(own).dequantise(own, torch.float32)
            expected = [whole.narrow(axis, start, stop - start) for start, stop in own_spans]
            assert torch.equal(found, torch.cat(expected, axis)), matrix
    with pytest.raises(lowlat.ConfigError, match=r"down.part holds 128 numbers of a row together"):
        rank_weights(
            {"layers.0.down.part": torch.empty(4, 3)}, rank_configs(with_changes(config, inner_size=368), 2)[1]
        )


REFUSED: tuple[tuple[int, dict[str, Any], str, int | None, str], ...] = (
    (3, {}, "cut", None, "tensor_parallel_size must be 1, 2, 4 or 8, got 3"),
    (2, {"devices": (0, 0), "device": "cuda"}, "cut", None, "as many GPUs as tensor_parallel_size 2, each once"),
    (2, {"devices": (0, 1), "device": "cpu"}, "cut", None, "device 'cpu' asks for one"),
    (4, {}, "cut", 2, "draft_tensor_parallel_size must be 1 or tensor_parallel_size 4, got 2"),
    (4, {}, "head", 4, "the draft model cannot be cut: tensor_parallel_size 4 is more than 1"),
)


def test_what_ranks_cannot_have_is_refused_by_name(targets: dict[str, Path]) -> None:
    target = targets["llama"]
    for size, options, head, asked, message in REFUSED:
        draft = lowlat.SpeculativeConfig(model=targets[head], draft_tensor_parallel_size=asked)
        with pytest.raises(lowlat.ConfigError, match=message):
            lowlat.Runtime.load(target, draft, tensor_parallel_size=size, **{**SHAPES, **options})
    config = read_model_config(target)
    for size, fields, message in (
        (8, {"num_heads": 4}, "8 is more than 2, the parts of num_attention_heads 4 with num_key_value_heads 2"),
        (8, {"inner_size": 56}, "cuts intermediate_size 56 into parts of multiples of 8"),
        (8, {"vocab_size": 60}, "needs 64 ids in a vocabulary, which has 60"),
        (8, {"quantiser": Quantiser("int4", group=32)}, "at multiples of 16, and 32 are held together"),
    ):
        with pytest.raises(lowlat.ConfigError, match=message):
            rank_configs(with_changes(config, **fields), size)


def test_memory_is_planned_by_gpu(targets: dict[str, Path]) -> None:
    """Two GPUs have half the cache each, and of the weights what is cut once, all else twice."""
    options = {"max_context": 64, "device": "cpu"}
    whole = model_report(targets["llama"], None, options, buffers=False)["memory"]
    gpus = model_report(targets["llama"], None, {**options, "tensor_parallel_size": 2}, buffers=False)["cards"]
    assert [gpu["kv_bytes"] * 2 for gpu in gpus] == [whole["kv_bytes"]] * 2
    config = read_model_config(targets["llama"])
    repeated = 4 * config.hidden_size * (config.vocab_size + 2 * config.num_layers + 1)
    assert sum(gpu["weights_bytes"] for gpu in gpus) == whole["weights_bytes"] + repeated
