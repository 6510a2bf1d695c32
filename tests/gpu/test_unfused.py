"""Fusion changes no bit: programs lowered operation by operation, and programs that identities interrupt."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from inserted import with_identities
from recording import run_all
from tiny_models import PairPaths, make_pair, mxfp4_target

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.engine.loading import programs
from lowlat.graphs.program import Program

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64}
NAMES = ("llama", "qwen3", "qwen2", "mistral", "gpt_oss", "mxfp4", "demo")
DEMO = Path(programs.__file__).parents[2] / "demo"
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": {"tree": ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))},
    "dynamic": {"dynamic_tree_max_topk": 3, "max_total_draft_tokens": 8},
}
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PairPaths]:
    """A pair of every family; one whose experts are MXFP4 has no draft model."""
    families = [name for name in NAMES if name not in ("mxfp4", "demo")]
    made = {family: make_pair(tmp_path_factory.mktemp(family), family, **SIZES) for family in families}
    directory = tmp_path_factory.mktemp("mxfp4")
    mxfp4_target(directory, gain=0.45, num_local_experts=9, num_experts_per_tok=4, sliding_window=70, **SIZES)
    return {**made, "mxfp4": PairPaths(directory, directory), "demo": PairPaths(DEMO / "target", DEMO / "head")}


def found(name: str, pairs: Mapping[str, PairPaths], *, shape: str, **options: Any) -> tuple[Any, State]:
    """Tokens and logprobs of three requests, greedy and sampled, and the bits of all that pages hold."""
    config = None
    if name != "mxfp4":
        config = SpeculativeConfig(model=pairs[name].head, num_speculative_tokens=3, strict=True, **SHAPES[shape])
    common: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_batch": 4, "max_context": 256}
    with Runtime.load(
        pairs[name].target, config, block_size=16, prefill_chunk=64, prefix_reuse=False, **common, **options
    ) as runtime:
        requests = []
        for number, temperature in enumerate((0.0, 0.8, 0.0)):
            prompt = torch.randint(3, 90, (40 + 50 * number,), generator=torch.Generator().manual_seed(number)).tolist()
            sampling = SamplingParams(max_tokens=24, temperature=temperature, seed=number, ignore_eos=True, logprobs=2)
            requests.append(runtime.submit(prompt, sampling))
        tokens = run_all(runtime, 0 if name == "mxfp4" else 3)
        state = runtime.executor.state
        paged = {key: state[key][1:].view(torch.uint8).cpu() for key, spec in state.specs.items() if spec.paging}
        return [tokens[each] for each in requests], paged


def assert_same(one: tuple[Any, State], other: tuple[Any, State]) -> None:
    assert one[0] == other[0]
    assert [key for key in one[1] if not torch.equal(one[1][key], other[1][key])] == []


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_unfused_programs_give_the_same_bits(name: str, shape: str, pairs: dict[str, PairPaths]) -> None:
    fused = found(name, pairs, shape=shape, executor="graph")
    assert_same(found(name, pairs, shape=shape, executor="eager", fuse=False), fused)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss", "mxfp4"])
def test_identities_anywhere_change_no_bit(
    name: str, seed: int, pairs: dict[str, PairPaths], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps and in prefill, captured."""
    fused = found(name, pairs, shape="chain", executor="graph")
    for part in ("build_step", "build_prefills"):
        monkeypatch.setattr(programs, part, inserting(getattr(programs, part), seed))
    assert_same(found(name, pairs, shape="chain", executor="graph"), fused)


def inserting(build: Callable[..., Any], seed: int) -> Callable[..., Any]:
    def built(*arguments: Any) -> Any:
        made = build(*arguments)
        if isinstance(made, Program):
            return with_identities(made, 12, seed)
        return {size: with_identities(each, 12, seed) for size, each in made.items()}

    return built
