"""Captured chunks of prefill on a GPU: the bits of those launched one by one, and no memory taken."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from prefill_cases import NAMES, Prefill, fp8_target, make_named, make_prefill
from recording import prompt_of, run_all, waiting_is_an_error
from tiny_models import PairPaths, make_pair, mxfp4_target

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.engine.mailbox.prefill_inputs import PrefillInputs
from lowlat.executors.launcher import Launcher
from lowlat.executors.planned import planned_workspaces
from lowlat.graphs import BufferSet, Paging
from lowlat.graphs.capture import capture
from lowlat.graphs.replay import CapturedGraph
from lowlat.step import state as shapes
from lowlat.step.prefill import build_prefill

DEVICE = torch.device("cuda", 0)
CHUNK, CONTEXT = 32, 250
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64}


def state_of(buffers: BufferSet) -> dict[str, torch.Tensor]:
    """Return a chunk's results as bytes: keys, values, features, and the last row for a first token."""
    left = [name for name, spec in buffers.specs.items() if spec.paging or name.startswith("prefilled_")]
    return {name: buffers[name].view(torch.uint8).cpu() for name in left}


def assert_same_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same bits in every cache and feature."""
    different = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not different


def captured_once(prefill: Prefill, stream: torch.cuda.Stream, pool: torch.cuda.MemPool) -> CapturedGraph:
    """The graph of a prefill, which has run before."""
    with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
        prefill.run()
        return capture(prefill.launcher.stream(), prefill.launches)


@pytest.mark.parametrize("name", NAMES)
def test_captured_chunks_have_the_bits_of_launched_ones(name: str, tmp_path: Path) -> None:
    """Every chunk of the longest prompt, the last a partial one, over pools of NaN."""
    pair = make_named(name, tmp_path)
    program, launcher = build_prefill(pair.geometry), Launcher(DEVICE)
    launched, captured = (make_prefill(pair, program, launcher) for _ in range(2))
    for prefill in (launched, captured):
        for key, spec in prefill.buffers.specs.items():
            if spec.paging is Paging.POSITIONS:
                prefill.buffers[key][1:].fill_(torch.nan)  # the null block holds what dead rows left, which is finite
    stream, pool = torch.cuda.Stream(DEVICE), torch.cuda.MemPool()
    torch.cuda.synchronize()
    before = state_of(captured.buffers)
    graph = captured_once(captured, stream, pool)
    torch.cuda.synchronize()
    assert_same_state(state_of(captured.buffers), before)
    tokens = torch.randint(0, 97, (CONTEXT,), generator=torch.Generator().manual_seed(1)).tolist()
    table = list(range(1, 1 + -(-CONTEXT // 16)))
    commands = {f"prefill_table{suffix}": table for suffix in ("", *(e.suffix for e in pair.geometry.window_pools))}
    for start in range(0, CONTEXT, CHUNK):
        for prefill in (launched, captured):
            PrefillInputs(prefill.buffers).write_chunk(1, tokens[start : start + CHUNK], start, commands)
            with torch.cuda.stream(stream):
                prefill.arguments.send()
                graph.launch(launcher.stream()) if prefill is captured else prefill.run()
            stream.synchronize()
        assert_same_state(state_of(captured.buffers), state_of(launched.buffers))
    buffers = captured.buffers
    assert all(bool(buffers[key][table[0]].isfinite().all()) for key in buffers if key.startswith("k_cache"))
    graph.close()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PairPaths]:
    """A dense pair, one with windows and sinks; a target in FP8, and one whose experts are MXFP4."""
    made = {family: make_pair(tmp_path_factory.mktemp(family), family, **SIZES) for family in ("llama", "gpt_oss")}
    directory = tmp_path_factory.mktemp("mxfp4")
    mxfp4_target(directory, gain=0.45, num_local_experts=9, num_experts_per_tok=4, sliding_window=70, **SIZES)
    coded = fp8_target(tmp_path_factory.mktemp("llama_rows"))
    return {**made, "mxfp4": PairPaths(directory, directory), "llama_rows": PairPaths(coded, coded)}


def load(name: str, pairs: dict[str, PairPaths], executor: str, **options: Any) -> Runtime:
    drafts = SpeculativeConfig(model=pairs[name].head, num_speculative_tokens=3, strict=True)
    head = drafts if pairs[name].head != pairs[name].target else None
    if name == "llama_rows":
        options = {"activations": "fp8", "prefill_chunk": 64} | options
    shape: dict[str, Any] = {"max_batch": 2, "max_context": CONTEXT, "block_size": 16, "prefill_chunk": CHUNK}
    common: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "executor": executor}
    common["max_stall_ms"] = 10_000.0  # how many chunks run at once, and so who comes first, is no matter of time
    return Runtime.load(pairs[name].target, head, **{**shape, **common, **options})


PARAMS = SamplingParams(seed=3, temperature=0.8, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_runtime_prefills_as_an_eager_one(name: str, pairs: dict[str, PairPaths]) -> None:
    """Prompts over several chunks, prefixes that are used again, two requests at once: tokens and bits of all state."""
    common = prompt_of(3 * CHUNK, 5)
    prompts = [prompt_of(200, 1), common + prompt_of(70, 2), common + prompt_of(9, 3), prompt_of(CHUNK + 1, 4), [7]]

    def run(executor: str) -> tuple[list[Any], dict[str, torch.Tensor]]:
        with load(name, pairs, executor) as runtime:
            found = [runtime.submit(prompt, PARAMS) for prompt in prompts]
            tokens = run_all(
                runtime, 3 if pairs[name].head != pairs[name].target else 0
            )  # steps of a given depth are not run ahead
            cached = [runtime.metrics(each).cached_prompt_tokens for each in found]
            return [[tokens[each] for each in found], cached], state_of(runtime.executor.state)

    graph, eager = run("graph"), run("eager")
    assert graph[0] == eager[0]
    assert max(graph[0][1]) == (2 if name == "llama_rows" else 3) * CHUNK, "the prefix was used again"
    assert_same_state(graph[1], eager[1])


@pytest.mark.parametrize("name", NAMES)
def test_chunks_that_run_together_have_the_bits_of_chunks_alone(name: str, pairs: dict[str, PairPaths]) -> None:
    """Tokens, caches and features, where one, three or eight chunks run at once."""
    found = []
    for at_once in (1, 3, 8):
        with load(name, pairs, "graph", prefix_reuse=False, max_prefill_chunks=at_once) as runtime:
            found.append(tokens_and_state(name, runtime, (200, CHUNK + 1, 75)))
    for tokens, state in found[1:]:
        assert tokens == found[0][0]
        assert_same_state(state, found[0][1])


@pytest.mark.parametrize("name", NAMES)
def test_short_ends_have_the_bits_of_whole_chunks(
    name: str, pairs: dict[str, PairPaths], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a chunk, a chunk of which most rows are dead, the end of several chunks that run together."""
    found = []
    for shortest, at_once in ((64, 1), (64, 2), (128, 1)):
        monkeypatch.setattr(shapes, "SHORT_STEP", shortest)
        with load(name, pairs, "graph", prefix_reuse=False, max_prefill_chunks=at_once, prefill_chunk=128) as runtime:
            assert runtime.geometry.prefill_sizes[0] == shortest
            found.append(tokens_and_state(name, runtime, (30, 64, 65, 168, 200)))
    for tokens, state in found[1:]:
        assert tokens == found[0][0]
        assert_same_state(state, found[0][1])


def tokens_and_state(
    name: str, runtime: Runtime, lengths: Sequence[int]
) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
    """Tokens of prompts of these lengths, one after another, and the caches and features that they leave."""
    tokens = []
    for length in lengths:
        request = runtime.submit(prompt_of(length, length), PARAMS)
        tokens.append(run_all(runtime)[request])
    state = {key: runtime.executor.state[key] for key, spec in runtime.executor.state.specs.items() if spec.paging}
    return tokens, {key: tensor[1:].cpu() for key, tensor in state.items()}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_allocated_by_a_captured_chunk(name: str, pairs: dict[str, PairPaths]) -> None:
    with load(name, pairs, "graph", prefix_reuse=False) as runtime:
        runtime.submit(prompt_of(CHUNK + 3, 1), PARAMS)
        run_all(runtime)
        torch.cuda.synchronize()
        undisturbed = False
        for seed in range(2, 8):  # the GPU's free memory is also what other processes take and give back
            before, free = torch.cuda.memory_stats()["allocation.all.allocated"], torch.cuda.mem_get_info()[0]
            runtime.submit(prompt_of(200, seed), PARAMS)
            for _ in range(8):
                runtime.step()
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
            undisturbed |= torch.cuda.mem_get_info()[0] == free
            run_all(runtime)
        assert undisturbed
        run_all(runtime)


@pytest.mark.parametrize("name", NAMES)
def test_a_launched_chunk_waits_for_nothing(name: str, pairs: dict[str, PairPaths]) -> None:
    """A captured operation may not wait; the eager executor shows which operation would."""
    with load(name, pairs, "eager") as runtime:
        executor: Any = runtime.executor
        runtime.submit(prompt_of(CHUNK + 3, 1), PARAMS)
        run_all(runtime)
        run = executor._run

        def checked(size: Any) -> None:
            with waiting_is_an_error():
                run(size)

        executor._run = checked
        runtime.submit(prompt_of(200, 2), PARAMS)
        run_all(runtime)


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_takes_no_more_than_is_planned(name: str, tmp_path: Path) -> None:
    pair = make_named(name, tmp_path)
    program = build_prefill(pair.geometry)
    launcher = Launcher(DEVICE)
    prefill = make_prefill(pair, program, launcher)
    planned = planned_workspaces((program,), pair.source, launcher.gpu)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, pool = torch.cuda.memory_reserved(), torch.cuda.MemPool()
    graph = captured_once(prefill, torch.cuda.Stream(DEVICE), pool)
    assert torch.cuda.memory_reserved() - before <= planned.temporary
    graph.close()
