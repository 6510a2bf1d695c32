"""Whoever makes a launch refuses arrays that do not fit the others: every launch of lowered programs, found by watching
them being lowered, is made again with one array that is wider, or has a row fewer.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from kernel_inventory import modules, offers_calls
from lowered import Pair
from lowering_cases import write_pair
from prefill_cases import coded_pair
from tiny_models import make_target

from lowlat.errors import ShapeError
from lowlat.graphs import Bucket
from lowlat.kernels.reference import OPERATIONS
from lowlat.kernels.speculation.draft_rows import take_blocks, take_last
from lowlat.kernels.toolchain.launches import Given
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.checks import CheckedKinds
from lowlat.step.decode import build_step
from lowlat.step.prefill import build_prefill
from lowlat.step.variants import PROPOSED

pytestmark = pytest.mark.second

MAKERS: Mapping[CodeType, tuple[str, Any]] = {
    inspect.unwrap(getattr(module, name)).__code__: (name, getattr(module, name))
    for module in modules().values()
    for name in offers_calls(module)
}
# arrays whose width whoever allocates them chose; those of a GEMM or norm of which a launch takes some columns
ANY_WIDTH = {
    "accepted_nodes", "accepted_tokens", "active", "block_table", "draft_nodes", "draft_texts", "names",
    "output_counts", "paths", "ring_count", "slots", "snapshots", "state_lens", "tokens", "top_tokens", "tree_paths",
    "advance_states row_live", "arranged_prefill_gemm partials", "delta_conv x", "delta_norm gates", "finite logits",
    "gated_delta x", "gated_prefill_gemm partials", "logprobs logits", "prefill_delta_conv x", "row_pairs logits",
    "take_columns out", "take_columns x",
}  # fmt: skip
# of as many slots, tokens, blocks or places of a ring as there are; one is taken alone
ANY_NUMBER = {
    "active", "block_features", "block_table", "command_ring", "conv_state", "draft_nodes", "names", "ring_checks",
    "slot_ints", "slots", "state", "state_lens", "tokens", "topology_masks",
    *(f"{name} weight" for name in ("draft_input", "draft_level_input", "embed", "embed_norm", "mask_input")),
    "parent_vectors weight", "row_pairs logits", "take_last_row x",
}  # fmt: skip
OF_OTHERS = {"combine_splits"}  # whose arrays attention made
HYBRID: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 64,
}  # fmt: skip


class Watched:
    """The arguments of each function that makes launches, as it was called first."""

    def __init__(self) -> None:
        self.given: dict[CodeType, dict[str, Any]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        def note(frame: FrameType, event: str, _: Any) -> None:
            code = frame.f_code
            if event == "call" and code in MAKERS and code not in self.given:
                given = dict(frame.f_locals)
                if isinstance(fitted := given.get("given"), Given):
                    del given["given"]
                    given = {**given, **fitted.arrays, **fitted.params}
                if code.co_flags & inspect.CO_VARKEYWORDS:
                    given |= given.pop(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
                self.given[code] = given

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def lower(self, pair: Pair, depth: int, *batches: int) -> None:
        """Steps of some batches, and prefill."""
        pair.geometry = replace(pair.geometry, prefill_chunk=64)
        programs = [*(pair.program(depth, batch) for batch in batches), build_prefill(pair.geometry)]
        assert pair.weights is not None
        with self.watching():
            for program in programs:
                pair.lower_program(program)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    found = Watched()
    for name in ("llama+everything", "llama+dflash2", "llama+dspark", "gpt_oss_mxfp4+alone"):
        paths, depth = write_pair(name, tmp_path_factory.mktemp(name)), 0 if name.endswith("alone") else 3
        for fuse in (True, False):
            found.lower(Pair(*paths, fuse=fuse), depth, 2)
    dynamic = {"num_speculative_tokens": 3, "dynamic_tree_max_topk": 4, "max_total_draft_tokens": 9}
    paths = write_pair("llama", tmp_path_factory.mktemp("llama"))
    found.lower(Pair(*paths, **dynamic), 3, 2)  # type: ignore[arg-type]
    found.lower(coded_pair(tmp_path_factory.mktemp("coded")), 0, 1)
    make_target(folder := tmp_path_factory.mktemp("hybrid"), "qwen3_5_text", **HYBRID)
    for fuse in (True, False):
        found.lower(Pair(folder, fuse=fuse), 0, 2)
    texts = Pair(*paths, text_drafts="suffix", wide_rows=32, draft_text_tokens=64)
    checked = Pair(*paths)
    checks = replace(checked.geometry, checks=CheckedKinds(masks=True, spans=True, lengths=True, falls_back=True))
    with found.watching():
        texts.lower_program(build_step(texts.geometry, Bucket(1, 32, 0, PROPOSED), TreeTopology.chain(0)))
        checked.lower_program(build_step(checks, Bucket(2, 4, 3), checked.topologies[3]))
    return found


@pytest.mark.parametrize("is_wider", [True, False], ids=["wider", "a row fewer"])
def test_arrays_of_other_shapes_are_refused(is_wider: bool, watched: Watched) -> None:
    num_refused, open_ones, taken = 0, ANY_WIDTH if is_wider else ANY_NUMBER, set()
    for code, given in watched.given.items():
        name, make = MAKERS[code]
        for argument, array in given.items():
            if name in OF_OTHERS or not isinstance(array, torch.Tensor) or not array.dim():
                continue
            if not is_wider and len(array) < 2:
                continue
            changed = array.new_zeros(*array.shape[:-1], array.shape[-1] + 8) if is_wider else array[:-1]
            try:
                make(**{**given, argument: changed})
            except ShapeError:
                num_refused += 1
            else:
                taken |= {argument, f"{name} {argument}"}
    left = {each for each in taken if " " in each and open_ones.isdisjoint({each, each.partition(" ")[2]})}
    assert not left and open_ones <= taken
    assert len(watched.given) > 90 and num_refused > 450


@pytest.mark.parametrize("take", [take_last, take_blocks])
def test_rows_of_no_slot_are_refused(take: Callable[..., Any]) -> None:
    x, commit_lens = torch.zeros(6, 8).bfloat16(), torch.ones(2).int()
    assert len(take([(x, x[:2])], commit_lens)) == 1
    with pytest.raises(ShapeError, match=r"^take_(last|block): commit_lens must be of one slot or more"):
        take([(x[:0], x[:0])], commit_lens[:0])
    meaning = OPERATIONS[take.__name__.removesuffix("s")]
    meaning(x, commit_lens, out=x[:2].clone())
    with pytest.raises(ShapeError, match=r"^commit_lens must be of one slot or more, got shape \[0\]"):
        meaning(x, commit_lens[:0], out=x[:0])
    with pytest.raises(ShapeError, match=r"^x must have as many rows for each of 2 slots, got shape \[5, 8\]"):
        meaning(x[:5], commit_lens, out=x[:2])
    with pytest.raises(ShapeError, match="takes 1 or 2 pairs, got 0"):
        take([], commit_lens)
