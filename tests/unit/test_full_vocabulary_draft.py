"""Heads whose draft vocabulary is the target's: what they propose at small size, and their kernels at 201088 ids."""

from pathlib import Path
from typing import Any

import pytest
import torch
from recording import Recorder, run_all
from safetensors.torch import load_file, save_file
from tiny_models import PairPaths, copying_draft_model, make_target

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.kernels.speculation.draft_topk import draft_topk
from lowlat.kernels.speculation.limits import MAX_RANKS
from lowlat.models.target import load_target
from lowlat.speculators.eagle3.weights import load_draft_model

FULL = 201088
OPTIONS: dict[str, Any] = {"max_batch": 2, "max_context": 96, "block_size": 4, "prefill_chunk": 8, "device": "cpu"}
TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))


def full_pair(directory: Path, *, own_lm_head: bool) -> PairPaths:
    """A gpt-oss and a head that may draft every id, by an LM head of its own or by the target's."""
    paths = PairPaths(directory / "target", directory / "head")
    target = make_target(paths.target, "gpt_oss", gain=0.45, num_hidden_layers=2)
    copying_draft_model(paths.head, target)
    if not own_lm_head:
        tensors = load_file(paths.head / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, paths.head / "model.safetensors", metadata={"format": "pt"})
    return paths


@pytest.mark.second
@pytest.mark.parametrize(("tree", "own_lm_head"), [(None, True), (TREE, False)], ids=["chain", "tree"])
def test_a_full_head_drafts_every_id_and_changes_no_token(own_lm_head: bool, tree: Any, tmp_path: Path) -> None:
    pair = full_pair(tmp_path, own_lm_head=own_lm_head)
    config = load_target(pair.target).config
    head = load_draft_model(pair.head, config)
    assert (head.config.draft_vocab_size, head.config.own_lm_head) == (config.vocab_size, own_lm_head)
    assert torch.equal(head.weights["draft_model.draft_to_target"], torch.arange(config.vocab_size, dtype=torch.int32))
    speculative = SpeculativeConfig(model=pair.head, num_speculative_tokens=3, tree=tree, strict=True)
    prompt, sampling = [5, 17, 3, 88, 41, 9, 60, 2], SamplingParams(temperature=0.0, max_tokens=40)
    with Runtime.load(pair.target, **OPTIONS) as runtime:
        request = runtime.submit(prompt, sampling)
        expected = run_all(runtime)[request]
    with Runtime.load(pair.target, speculative, **OPTIONS) as runtime:
        recorder = Recorder(runtime)
        request = recorder.submit(prompt, sampling)
        assert run_all(runtime)[request] == expected
        recorder.stop()
    assert recorder.num_accepted > 5


def _workspace(held: dict[str, torch.Tensor]) -> Any:
    def get(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        held[name] = torch.zeros(shape, dtype=dtype, device="meta")
        return held[name]

    return get


@pytest.mark.parametrize("ranks", [2, 10, MAX_RANKS])
@pytest.mark.parametrize("slots", [1, 8])
def test_the_choice_among_all_ids_is_one_launch_with_little_workspace(ranks: int, slots: int) -> None:
    """50 blocks a row, which the GPUs can hold at once; partial lists of 8 bytes a rank and block."""
    logits = torch.zeros(slots * 4, FULL, device="meta")
    names = torch.arange(FULL, dtype=torch.int32, device="meta")
    nodes = [torch.zeros(6, dtype=torch.int32, device="meta") for _ in range(3)]
    held: dict[str, torch.Tensor] = {}
    (call,) = draft_topk(
        logits, names, torch.ones(slots * 4, dtype=torch.uint8, device="meta"),
        out=torch.zeros(slots * 4, ranks, dtype=torch.int32, device="meta"), k=ranks, workspace=_workspace(held),
        children=nodes[0], child_rows=nodes[1], child_ranks=nodes[2],
        draft_nodes=torch.zeros(slots, 26, dtype=torch.int32, device="meta"),
    )  # fmt: skip
    assert call.grid == (50, slots * 4, 1)
    assert sum(tensor.numel() * 4 for tensor in held.values()) == slots * 4 * (50 * ranks * 8 + 4)
