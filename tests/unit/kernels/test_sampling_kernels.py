"""The kernels that choose tokens, without a GPU: what they compile to, how they are called, what they refuse."""

from typing import Any

import pytest
import torch
from compiled_examples import Compiled
from sampling_cases import World
from selection_cases import Memory, draw_scores
from stages import later, wide

from lowlat.errors import ShapeError
from lowlat.kernels.reference.step.slot_record import MAX_LOGPROBS, NUM_INTS
from lowlat.kernels.sampling import argmax as argmax_kernels
from lowlat.kernels.sampling import row_pairs as pair_kernels
from lowlat.kernels.sampling import sample as sample_kernels
from lowlat.kernels.sampling.logprobs import prompt as prompt_kernels
from lowlat.kernels.sampling.logprobs import tokens as logprob_kernels
from lowlat.kernels.speculation import draft_topk as draft_kernels

MODULES = (argmax_kernels, draft_kernels, logprob_kernels, pair_kernels, sample_kernels, prompt_kernels)
REGISTERS = 128  # two blocks of 256 threads and more fit on an SM


LEFT_OUT = ("argmax", "finite", "take_prompt", "token_ranks", "keep_prompt")  # they read few, or nothing but rows


@pytest.mark.parametrize("stage", ["first", later("second"), wide("wide")])
def test_resources_and_wide_rows_are_read_by_16_bytes_and_divided_exactly(stage: str, compiled: Compiled) -> None:
    for kernel, code, ptx in compiled.each(stage, *MODULES):
        assert code.stack_bytes == 0, kernel.name
        assert 0 < code.registers <= REGISTERS, kernel.name
        assert code.shared_bytes <= 48 * 1024, kernel.name
        if "_97" in kernel.name or kernel.name.startswith(LEFT_OUT):
            continue
        copied = ptx.count("cp.async.cg.shared.global") >= 4 and "ld.shared.v4.u32" in ptx
        assert copied or ptx.count("ld.global.v4.u32") >= 4, kernel.name  # each thread's own words
        assert "approx.f32" not in ptx.replace("ex2.approx.ftz.f32", "").replace("ex2.approx.f32", ""), kernel.name
        assert "div.full" not in ptx, kernel.name


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def level(**changed: Any) -> Any:
    own = {"tokens": ints(6, 3), "parents": ints(6, 1), "row_live": ints(6, 1).byte()}
    vectors = {"weight": torch.zeros(9, 16).bfloat16(), "vectors": torch.zeros(6, 16).bfloat16()}
    return argmax_kernels.NextLevel(**{**own, **vectors, **changed})


def test_argmax_calls_and_refusals() -> None:
    good: dict[str, Any] = {"best": ints(6, 5, 2), "out": ints(6), "names": ints(900)}
    (call,) = argmax_kernels.argmax(**good)
    assert call.grid == (6, 1, 1)
    for options, match in (
        ({"assign": (ints(3), ints(2), ints(3), ints(2, 4))}, "child_rows must"),
        ({"assign": (ints(3), ints(3), ints(2), ints(2, 4))}, "child_ranks must"),
        ({"assign": (ints(3), ints(3), ints(3), ints(4, 4))}, "best must"),
        ({"then": level(parents=ints(5, 1))}, "parents must"),
        ({"then": level(tokens=ints(5, 3))}, "tokens must"),
        ({"then": level(vectors=torch.zeros(5, 16).bfloat16())}, "vectors must"),
        ({"then": level(weight=torch.zeros(9, 20).bfloat16(), vectors=torch.zeros(6, 20).bfloat16())}, "multiple of 8"),
    ):
        with pytest.raises(ShapeError, match=match):
            argmax_kernels.argmax(**{**good, **options})


def test_what_stands_alone_makes_its_own_pairs() -> None:
    memory, logits = Memory("cpu"), torch.zeros(6, 5000)
    chain = draft_kernels.draft_topk(logits, ints(5000), out=ints(6, 1), k=1, workspace=memory)
    flags = torch.zeros(2, 3, dtype=torch.uint8)
    finite = pair_kernels.finite(logits, flags, finite=flags, workspace=memory)
    for calls, names in (
        (chain, ["row_pairs_5000_7f800000", "argmax"]),
        (finite, ["row_pairs_5000_7f7fffff", "finite"]),
    ):
        assert [call.kernel.name.startswith(name) for call, name in zip(calls, names, strict=True)] == [True, True]
        assert calls[0].grid == (2, 6, 1)
        pairs = (calls[0].arguments[1], calls[1].arguments[0])
        assert all(isinstance(each, torch.Tensor) and each.shape == (6, 2, 2) for each in pairs)
    with pytest.raises(ShapeError, match="row_live must"):
        pair_kernels.finite(logits, flags[:1], finite=flags, workspace=memory)
    with pytest.raises(ShapeError, match="logits: columns must"):
        pair_kernels.finite(torch.zeros(6, 327681), flags, finite=flags, workspace=memory)


@pytest.mark.parametrize("k", [1, 4])
def test_draft_topk_calls_and_refusals(k: int) -> None:
    memory, logits = Memory("cpu"), torch.zeros(6, 300)
    tree = {"children": ints(3), "child_rows": ints(3), "child_ranks": ints(3), "draft_nodes": ints(2, 5)}
    best = ints(6, 3, 2) if k == 1 else None
    good: dict[str, Any] = {
        "logits": logits,
        "draft_to_target": ints(300),
        "out": ints(6, k),
        "k": k,
        "best": best,
        **tree,
    }
    (call,) = draft_kernels.draft_topk(**good, workspace=memory)
    assert call.grid == ((6, 1, 1) if k == 1 else (1, 6, 1))
    assert call.kernel.name.startswith("argmax" if k == 1 else "draft_topk")
    for options, match in (
        ({"k": 0, "out": ints(6, 0)}, "k must"),
        ({"k": 65, "out": ints(6, 65)}, "k must"),
        ({"k": k + 1}, "out must"),
        ({"draft_to_target": ints(299)}, "draft_to_target must"),
        ({"row_live": torch.ones(5, dtype=torch.uint8)}, "row_live must"),
        ({"child_rows": ints(2)}, "child_rows must"),
        ({"child_ranks": ints(4)}, "child_ranks must"),
        ({"draft_nodes": ints(4, 5)}, "best must" if k == 1 else "logits must"),
        ({"k": 1, "out": ints(6, 1), "best": ints(5, 3, 2)}, "best must"),
    ):
        with pytest.raises(ShapeError, match=match):
            draft_kernels.draft_topk(**{**good, **options}, workspace=memory)


def test_logprobs_calls() -> None:
    memory, columns = Memory("cpu"), MAX_LOGPROBS + 1
    good: dict[str, Any] = {
        "logits": torch.zeros(6, 5000),
        "row_live": torch.ones(2, 3, dtype=torch.uint8),
        "target_tokens": ints(2, 3),
        "slots": ints(2),
        "slot_ints": torch.zeros(4, NUM_INTS, dtype=torch.int64),
        "logprob_values": torch.zeros(2, 3, columns),
        "logprob_ids": ints(2, 3, columns),
    }
    (call,) = logprob_kernels.logprobs(**good, workspace=memory)
    assert call.grid == (2, 6, 1)


def test_sample_calls_and_refusals() -> None:
    memory, world = Memory("cpu"), World(5000, 3)
    good: dict[str, Any] = {
        "logits": torch.zeros(4, 5000),
        "row_live": torch.ones(2, 2, dtype=torch.uint8),
        "row_tokens": ints(2, 2),
        "row_masks": torch.ones(2, 2, dtype=torch.int64),
        "slots": ints(2),
        **world.state(),
        "target_tokens": ints(2, 2),
        "best": ints(4, 3, 2),
        "finite": torch.zeros(2, 2, dtype=torch.uint8),
    }
    (call,) = sample_kernels.sample(**good, workspace=memory)
    assert call.grid == (2, 4, 1)
    pairs, alone = sample_kernels.sample(**{**good, "best": None, "finite": None}, workspace=memory)
    assert pairs.kernel.name == "row_pairs_5000_7f7fffff" and alone.arguments[15] is pairs.arguments[1]
    for name, array in good.items():
        with pytest.raises(ShapeError, match="must "):  # it, or what it does not fit, is named
            sample_kernels.sample(**{**good, name: array[:1]}, workspace=memory)


def test_near_ties_are_judged_by_the_reference_s_own_scores() -> None:
    world = World(50, 1)
    world.set(0, temperature=0.8, seed=4, top_p=0.9, repetition=1.2, frequency=0.3, min_tokens=9, length=12)
    world.stop_ids[0, 0] = 3
    world.bias(0, {7: 2.0})
    world.output_counts.random_(0, 2)
    logits, masks, tokens = torch.randn(3, 50) * 3, [1, 3, 7], [0, 5, 5]
    drawn = world.draw(logits, [0], [tokens], [masks])[0]
    scores = [draw_scores(world, logits[node], 0, tokens, masks[node]) for node in range(3)]
    assert [int(score.argmax()) for score in scores] == drawn
