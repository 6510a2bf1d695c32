"""Steps that choose their draft length: kernels against references, graphs against launches one by one, loops."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_length_cases import MOST, check_lengths, check_waiting
from kernel_cases import Bench
from recording import prompt_of, run_all
from tiny_models import PairPaths, make_pair

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.executors.graph import GraphExecutor
from lowlat.step.draft_length_times import by_time

OPTIONS: dict[str, Any] = {"max_batch": 4, "max_context": 256, "block_size": 16, "prefill_chunk": 32} | {
    "device": "cuda",
    "dtype": "bfloat16",
}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64}
MODES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "logprobs": 3},
    {"temperature": 0.8, "repetition_penalty": 1.3, "max_draft_tokens": 2},
]


@pytest.mark.parametrize("seed", range(4))
def test_widths_are_the_reference_s(seed: int, bench: Bench) -> None:
    chosen = check_lengths(bench, seed, 8 + 4 * (seed % 2), steps=400)
    assert {0, MOST + 1} <= chosen and len(chosen) > 3


@pytest.mark.parametrize("seed", range(10))
def test_waiting_rows_are_the_reference_s(seed: int, bench: Bench) -> None:
    check_waiting(bench, seed)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    """A small target and a draft model."""
    directory: Path = tmp_path_factory.mktemp("pair")
    return make_pair(directory, "llama", **SIZES)


def load(pair: PairPaths, executor: str, **options: Any) -> Runtime:
    """A runtime that chooses draft lengths up to 7."""
    config = SpeculativeConfig(model=pair.head, num_speculative_tokens=7, adaptive_width=True, strict=True)
    return Runtime.load(pair.target, config, executor=executor, **{**OPTIONS, **options})


def tokens_of(runtime: Runtime, depth: Any = None) -> list[list[int]]:
    """Eight requests at once, of all modes."""
    names = [
        runtime.submit(
            prompt_of(5 + 11 * number, 70 + number),
            SamplingParams(seed=number, max_tokens=60 + 9 * number, ignore_eos=True, **MODES[number % 4]),
        )
        for number in range(8)
    ]
    found = run_all(runtime, depth)
    return [found[name] for name in names]


@pytest.fixture(scope="module")
def expected(pair: PairPaths) -> list[list[int]]:
    """The tokens without a draft model."""
    with Runtime.load(pair.target, executor="graph", **OPTIONS) as runtime:
        return tokens_of(runtime)


@pytest.fixture(scope="module")
def runtimes(pair: PairPaths) -> Iterator[dict[str, Runtime]]:
    """Graphs, graphs that are loops, and launches one by one; fused and not."""
    made = {
        "graph": load(pair, "graph"),
        "loop": load(pair, "graph", device_loop=True),
        "eager": load(pair, "eager"),
        "alone": load(pair, "eager", fuse=False),
    }
    yield made
    for runtime in made.values():
        runtime.close()


@pytest.mark.parametrize("depths", [None, 0, 3, "random"])
@pytest.mark.parametrize("name", ["graph", "loop", "eager", "alone"])
def test_no_draft_length_changes_a_token(
    name: str, depths: Any, runtimes: dict[str, Runtime], expected: list[list[int]]
) -> None:
    depth = random.Random(5).choices(range(8), k=3000).__getitem__ if depths == "random" else depths
    assert tokens_of(runtimes[name], depth) == expected


def test_replay_equals_eager_bit_for_bit(pair: PairPaths) -> None:
    """One request, the same costs, so the same choices: the same bits in every buffer that outlives a step."""
    found = []
    for executor in ("graph", "eager"):
        with load(pair, executor) as runtime:
            costs = runtime.executor.state["draft_length_costs"]
            every = torch.arange(100, 100 + costs.shape[2], device=costs.device, dtype=costs.dtype)
            costs.copy_(every.expand_as(costs) * torch.tensor([[1], [0]], device=costs.device))
            runtime.submit(prompt_of(40), SamplingParams(max_tokens=200, temperature=0.8, seed=3, ignore_eos=True))
            run_all(runtime)
            runtime.executor.synchronize()
            found.append({name: tensor.cpu().clone() for name, tensor in runtime.executor.state.items()})
    # a step for nobody may have run ahead; a prompt's dead rows are whatever their memory held
    skipped = ("staged", "prefill_", "prompt_", "command", "ring", "draft_length_choice", "opened.")
    different = [
        name
        for name, tensor in found[1].items()
        if not name.startswith(skipped) and not torch.equal(tensor.view(torch.uint8), found[0][name].view(torch.uint8))
    ]
    assert not different


def test_times_of_widths_are_times(pair: PairPaths, runtimes: dict[str, Runtime], expected: list[list[int]]) -> None:
    """More levels take longer, and what was measured on leaves nothing after."""
    runtime = runtimes["graph"]
    executor = runtime.executor
    assert isinstance(executor, GraphExecutor)
    before = executor.state["draft_length_costs"].clone()
    assert (before[0, 0] > 0).all() and before[0, 0, 7] > before[0, 0, 1] > before[0, 0, 0]
    with load(pair, "graph") as other:  # the file of its times is there
        assert torch.equal(other.executor.state["draft_length_costs"], before)
        assert isinstance(other.executor, GraphExecutor)
        times = by_time(other.executor, other.ladder.buckets, other.geometry.num_waiting)
        for each in times.values():
            base = each.base
            assert base[7] > base[3] > base[1] > base[0] > 0.0 and base[-1] > base[0]
        other.executor.state["draft_length_costs"].copy_(before)
        assert tokens_of(other) == expected


@pytest.mark.parametrize("loops", [False, True])
def test_what_a_router_does_is_learnt_and_changes_no_token(loops: bool, tmp_path: Path) -> None:
    """Choices of the experts are copied while steps run ahead, or a loop goes on."""
    experts = make_pair(tmp_path, "gpt_oss", **SIZES, num_local_experts=16, num_experts_per_tok=2)
    with Runtime.load(experts.target, executor="graph", **OPTIONS) as plain:
        expected = tokens_of(plain)
    with load(experts, "graph", device_loop=loops) as runtime:
        learner: Any = runtime._steps._learner
        for each in learner._costs.values():
            assert each.per_expert > 0 and all(2.0 <= count <= 16.0 for count in each.experts)
        assert tokens_of(runtime) == expected
        found = runtime.summary()["experts_by_rows"]
        assert found["1"][0] == pytest.approx(2.0) and all(
            2.0 <= each <= 16.0 for row in found.values() for each in row
        )
