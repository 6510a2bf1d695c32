"""Steps that choose their draft length: programs lower, drafts are those of fixed lengths, times are kept."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lowered import Pair
from recording import prompt_of, run_all
from stages import later, wide
from tiny_models import PairPaths, make_pair

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.errors import ConfigError
from lowlat.executors.workspace import SharedWorkspace
from lowlat.graphs import Bucket, BufferSet
from lowlat.kernels.toolchain.digests import source_digest
from lowlat.kernels.toolchain.kernel import H200
from lowlat.lowering.binding import Binding
from lowlat.lowering.lower import lower
from lowlat.step import draft_length_times
from lowlat.step.adaptive import build_adaptive
from lowlat.step.draft_length_costs import StepCosts
from lowlat.step.ladder import StepLadder
from lowlat.step.variants import bodies_of, choice_bucket, is_choice

DEMO = Path(__file__).parents[2] / "lowlat" / "demo"
OPTIONS: dict[str, Any] = {"max_batch": 4, "max_context": 128, "block_size": 4, "prefill_chunk": 8, "device": "cpu"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    """A small target and a draft model."""
    return make_pair(tmp_path_factory.mktemp("llama"), "llama")


def load(pair: PairPaths, depth: Any = 5, *, adaptive: bool = True, **options: Any) -> Runtime:
    config = SpeculativeConfig(model=pair.head, num_speculative_tokens=depth, adaptive_width=adaptive, strict=True)
    return Runtime.load(pair.target, config, **{**OPTIONS, "dtype": "float32", **options})


@pytest.mark.parametrize("depth", [later(3), wide(5), wide(7)])
def test_drafts_are_those_of_a_fixed_width(depth: int, pair: PairPaths) -> None:
    """With all positions run over at once or one after the other: acceptance is what it was, draft by draft."""
    found = []
    sampling = SamplingParams(max_tokens=40, temperature=0.6, seed=2)
    for options in ({"adaptive": False}, {}):
        with load(pair, depth, max_batch=1, **options) as runtime:
            for length in (9, 16):
                runtime.submit(prompt_of(length), sampling)
            run_all(runtime, depth)
            found.append(runtime.summary()["eagle_speculation"])
    assert found[0] == found[1] and found[0]["total_accepted_tokens"] > 10


def test_positions_that_wait_are_run_over_before_there_are_too_many(pair: PairPaths) -> None:
    """Steps of length zero leave them, and one in so many runs the draft model; drafts after it are as ever."""
    with load(pair, max_batch=2) as runtime:
        runtime.submit(prompt_of(20), SamplingParams(max_tokens=90, temperature=0.0))
        state, waiting = runtime.executor.state, list[int]()
        while runtime.busy:
            runtime.step(0 if len(waiting) < 70 else 5)
            waiting.append(int(state["lengths"][0] - 1 - state["extended"][0]))
        assert max(waiting[:70]) == runtime.geometry.num_waiting == 32 and waiting[:70].count(1) >= 2
        assert runtime.summary()["steps_by_width"][0] >= 69
        assert runtime.summary()["eagle_speculation"]["total_accepted_tokens"] > 0


def test_all_programs_lower() -> None:
    """A choice is one launch, and a body has those of a step of its length; without drafts one less, with the choice as
    many.
    """
    pair = Pair(DEMO / "target", DEMO / "head", adaptive_width=True, num_speculative_tokens=3)
    alone = Pair(DEMO / "target")
    ladder, counts = StepLadder([2], {depth: depth + 1 for depth in range(4)}, adaptive=True), {}
    for bucket in ladder.programs:
        program = build_adaptive(pair.geometry, bucket)
        buffers = BufferSet(program.buffers.values(), torch.device("cpu"), program.constants)
        workspace = SharedWorkspace(torch.device("cpu"))
        binding = Binding(program, buffers, pair.weights, H200, workspace, None, switches=True)
        calls = [call for group in lower(binding) for call in group.kernel_calls]
        counts[bucket] = len(calls)
        unlinked = [call.kernel.name for call in calls if not call.kernel.linked]
        assert len(unlinked) == is_choice(bucket)
    for bucket in ladder.buckets:
        assert counts[bucket] == 1
        for body in bodies_of(bucket)[1:-1]:
            assert counts[body] == len(pair.lower(body.num_speculative_tokens, body.batch).calls)
        assert counts[bodies_of(bucket)[0]] + counts[bucket] == len(alone.lower(0, bucket.batch).calls)


def test_what_an_opening_leaves_is_its_bodies() -> None:
    """Slots and rows have one address in an opening and its bodies, and another in those of other batches."""
    geometry = Pair(DEMO / "target", DEMO / "head", adaptive_width=True, num_speculative_tokens=3).geometry
    ladder = StepLadder([1, 2], {depth: depth + 1 for depth in range(4)}, adaptive=True)
    for bucket in ladder.buckets:
        opening, *bodies = (build_adaptive(geometry, each) for each in (bucket, *bodies_of(bucket)))
        left = {name: spec for name, spec in opening.buffers.items() if name.startswith("opened.")}
        assert len(left) == 10 and all(name.startswith(f"opened.{bucket.batch}.") for name in left)
        for body, program in zip(bodies_of(bucket), bodies, strict=True):
            taken = {name: spec for name, spec in program.buffers.items() if name.startswith("opened.")}
            assert taken.items() <= left.items() and len(taken) == (1 if body.num_speculative_tokens else 10)


def test_what_cannot_be_chosen_is_refused(pair: PairPaths) -> None:
    with pytest.raises(ConfigError, match=r"adaptive_width .* tree asks"):
        SpeculativeConfig(model="x", num_speculative_tokens=1, adaptive_width=True, tree=[[0]])
    with pytest.raises(ConfigError, match=r"adaptive_width .* num_speculative_tokens is 0"):
        SpeculativeConfig(model="x", num_speculative_tokens=0, adaptive_width=True)
    automatic: Any = {"num_speculative_tokens": "auto"}
    config = SpeculativeConfig(model=pair.head, **automatic, text_drafts="suffix")
    assert (config.num_speculative_tokens, config.adaptive_width) == (7, True)
    with pytest.raises(ConfigError, match=r"adaptive_width .* text_drafts 'suffix'"):
        Runtime.load(pair.target, config, **OPTIONS)
    with pytest.raises(ConfigError, match="num_speculative_tokens must be an integer or 'auto', got 'automatic'"):
        replace(config, num_speculative_tokens="automatic")  # type: ignore[arg-type]


def test_times_are_kept_for_the_same_facts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that cannot be read, or that fit no longer, are measured again."""
    bucket = choice_bucket(1, 2)
    measured: list[int] = []

    costs = StepCosts([1.0, 1.5, 1.75, 1.25], [0.0, 0.25, 0.5, 0.0], [4.0, 6.5, 8.0, 4.0], 0.125)

    def by_time(*_: Any) -> dict[Bucket, StepCosts]:
        measured.append(1)
        return {bucket: costs}

    monkeypatch.setattr(draft_length_times, "by_time", by_time)
    monkeypatch.setattr(draft_length_times, "cache_directory", lambda: tmp_path)

    def times(**facts: Any) -> Any:
        return draft_length_times._kept_times(None, [bucket], 8, 0.125, facts)  # type: ignore[arg-type]

    assert times(gpu="a") == times(gpu="a") == {bucket: costs}
    assert len(measured) == 1
    times(gpu="b")
    assert len(measured) == 2
    for file in (tmp_path / "widths").iterdir():
        values = json.loads(file.read_text())
        file.write_text(
            json.dumps({**values, "times_ms": {str(bucket): {"base": [1.0], "per_position": [0.0]}}})
            if "a" in values["facts"]
            else "{"
        )
    times(gpu="a")
    times(gpu="b")
    assert len(measured) == 4
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: type("Gpu", (), {"name": "A GPU"}))
    stand_in: Any = type("Executor", (), {"device": "cuda"})
    geometry = Pair(DEMO / "target", DEMO / "head", adaptive_width=True, num_speculative_tokens=3).geometry
    digests = [source_digest(), "of other kernels", "of other kernels"]
    for digest in digests:
        monkeypatch.setattr("lowlat.kernels.toolchain.digests.source_digest", lambda digest=digest: digest)
        times(**draft_length_times._facts(stand_in, geometry, fuse=True))
    assert len(measured) == 6
