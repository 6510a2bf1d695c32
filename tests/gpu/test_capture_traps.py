"""Traps of captured steps, each tried on the GPU: what a capture may hold, what a replay sees, memory."""

import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from recording import run_all, waiting_is_an_error
from tiny_models import PairPaths, make_pair

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.errors import DeviceError, LowlatError
from lowlat.executors.graph import GraphExecutor
from lowlat.executors.launcher import Launcher
from lowlat.graphs.capture import Choice, capture, capture_choice
from lowlat.graphs.launch import KernelLaunch, Launch
from lowlat.graphs.loop import capture_loop
from lowlat.graphs.replay import CapturedGraph
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, types

LANES = 32
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64}


def add(values: Any, step: Any) -> None:
    """The kernel that is captured here: `values` [32] grow by `step`."""
    values[cuda.threadIdx.x] += step


ADD = Kernel("trap_add", add, (types.Array(types.int64, 1, "C"), types.int64), LANES)


class Straying(KernelLaunch):
    """A launch that does something besides; `stray` gets the builder."""

    stray: Callable[[Any], object]

    def issue(self, target: Any) -> None:
        super().issue(target)
        self.stray(target)


class Bench:
    """32 numbers, a stream of their own, and graphs of one kernel that adds to them."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher, self.values = launcher, torch.zeros(LANES, dtype=torch.int64, device="cuda")
        self.stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            self.core_stream = launcher.stream()

    def launch_of(self, step: int) -> KernelLaunch:
        launch = self.launcher.prepare(KernelCall(ADD, (1, 1, 1), (self.values, step)))
        assert isinstance(launch, KernelLaunch)
        return launch

    def capture(self, step: int = 1, stray: Callable[[Any], object] | None = None) -> CapturedGraph:
        launch = self.launch_of(step)
        if stray is None:
            return capture(self.core_stream, [launch])
        straying = Straying(launch.name, launch.kernel, launch.config, launch.arguments)
        object.__setattr__(straying, "stray", stray)
        return capture(self.core_stream, [straying])

    def replayed(self, graph: CapturedGraph, times: int = 1) -> list[int]:
        for _ in range(times):
            graph.launch(self.core_stream)
        self.stream.synchronize()
        return sorted(set(self.values.tolist()))


@pytest.fixture
def bench(launcher: Launcher) -> Bench:
    return Bench(launcher)


def torch_stream(builder: Any) -> Any:
    """Torch's view of the stream that is being captured."""
    return torch.cuda.ExternalStream(int(builder.stream.handle))


def copies(builder: Any) -> None:
    source, target = torch.ones(LANES, device="cuda"), torch.zeros(LANES, device="cuda")
    with torch.cuda.stream(torch_stream(builder)):
        target.copy_(source)


def clears(builder: Any) -> None:
    target = torch.ones(LANES, device="cuda")
    with torch.cuda.stream(torch_stream(builder)):
        target.zero_()


def launches_a_foreign_kernel(builder: Any) -> None:
    target = torch.ones(LANES, device="cuda")
    with torch.cuda.stream(torch_stream(builder)):
        target.add_(1.0)


def allocates(builder: Any) -> None:
    from cuda.bindings import driver

    status, _ = driver.cuMemAllocAsync(256, driver.CUstream(int(builder.stream.handle)))
    assert status == driver.CUresult.CUDA_SUCCESS


def calls_the_host(builder: Any) -> None:
    builder.callback(lambda: None)


STRAYS = [copies, clears, launches_a_foreign_kernel, allocates, calls_the_host]


@pytest.mark.parametrize("stray", STRAYS, ids=lambda stray: stray.__name__)
def test_a_capture_that_does_anything_else_is_refused(stray: Callable[[Any], object], bench: Bench) -> None:
    with pytest.raises(DeviceError, match="a captured step must hold 1 kernels"):
        bench.capture(stray=stray)
    assert bench.values.sum() == 0, "nothing ran while it was captured"
    assert bench.replayed(bench.capture()) == [1], "the stream is as good as before"


@pytest.mark.parametrize("stray", STRAYS, ids=lambda stray: stray.__name__)
@pytest.mark.parametrize("kind", ["loop", "choice", "choice in a loop"])
def test_so_is_a_body(kind: str, stray: Callable[[Any], object], bench: Bench) -> None:
    def body(condition: int) -> Iterator[Launch]:
        launch = bench.launch_of(1)
        straying = Straying(launch.name, launch.kernel, launch.config, launch.arguments)
        object.__setattr__(straying, "stray", stray)
        yield straying

    choice = Choice(lambda condition: [bench.launch_of(1)], [lambda condition: [bench.launch_of(2)], body])
    with pytest.raises(DeviceError):
        if kind == "choice":
            capture_choice(bench.core_stream, choice)
        else:
            capture_loop(bench.core_stream, body if kind == "loop" else choice)
    assert bench.replayed(bench.capture()) == [1]


def test_waiting_for_the_stream_while_it_is_captured_is_refused(bench: Bench) -> None:
    from cuda.bindings import driver

    def waits(builder: Any) -> None:
        driver.cuStreamSynchronize(driver.CUstream(int(builder.stream.handle)))

    with pytest.raises(DeviceError, match="cannot be captured"):
        bench.capture(stray=waits)
    assert bench.replayed(bench.capture()) == [1]


def test_an_error_while_capturing_leaves_the_stream_usable(bench: Bench) -> None:
    def fails(builder: Any) -> None:
        raise ValueError("a wrong argument")

    with pytest.raises(DeviceError, match="a wrong argument"):
        bench.capture(stray=fails)
    assert bench.replayed(bench.capture(), 3) == [3]


def test_numbers_are_frozen_and_buffers_are_not(bench: Bench) -> None:
    step = 5
    graph = bench.capture(step)
    step = 7
    assert bench.replayed(graph, 2) == [10], "the step of the capture, not today's"
    bench.values.fill_(100)
    torch.cuda.synchronize()
    assert bench.replayed(graph) == [105], "what the buffer holds now"


def test_a_graph_adds_to_the_buffer_it_was_captured_with(bench: Bench) -> None:
    graph, first = bench.capture(), bench.values
    bench.values = torch.zeros_like(first)
    torch.cuda.synchronize()
    assert bench.replayed(graph) == [0]
    assert first.tolist() == [1] * LANES


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    return make_pair(tmp_path_factory.mktemp("pair"), "llama", **SIZES)


def load(pair: PairPaths) -> Runtime:
    config = SpeculativeConfig(model=pair.head, num_speculative_tokens=3, strict=True)
    options: dict[str, Any] = {"max_batch": 2, "max_context": 160, "block_size": 16, "prefill_chunk": 32}
    return Runtime.load(pair.target, config, device="cuda", dtype="bfloat16", executor="graph", **options)


def submit(runtime: Runtime, seed: int = 3, max_tokens: int = 60) -> str:
    params = SamplingParams(seed=seed, temperature=0.8, max_tokens=max_tokens, ignore_eos=True)
    name: str = runtime.submit([5, 11, 7, seed], params)
    return name


def tokens_of(runtime: Runtime) -> list[int]:
    name = submit(runtime)
    return run_all(runtime)[name]


def test_nothing_is_allocated_or_waited_for_between_steps(pair: PairPaths) -> None:
    """Other processes take memory of the GPU, too: what steps took would be gone in every turn, not in some."""
    with load(pair) as runtime:
        tokens_of(runtime)
        names = [submit(runtime, seed) for seed in (1, 2)]
        for _ in range(4):  # first tokens, and a step after each
            runtime.step()
        torch.cuda.synchronize()
        before, free = torch.cuda.memory_stats()["allocation.all.allocated"], [torch.cuda.mem_get_info()[0]]
        with waiting_is_an_error():
            for _ in range(10):
                assert runtime.step()
                free.append(torch.cuda.mem_get_info()[0])
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert any(after == earlier for earlier, after in itertools.pairwise(free))
        for name in names:
            runtime.cancel(name)
        run_all(runtime)


def test_memory_that_others_take_is_none_of_a_graph_s(pair: PairPaths) -> None:
    with load(pair) as runtime:
        expected = tokens_of(runtime)
        gc.collect()
        torch.cuda.empty_cache()
        foreign = [torch.full((1 << size,), float("nan"), device="cuda") for size in range(8, 26) for _ in range(4)]
        torch.cuda.synchronize()
        assert tokens_of(runtime) == expected
        assert all(bool(tensor.isnan().all()) for tensor in foreign)


def test_two_runtimes_on_one_gpu_do_not_touch_each_other(pair: PairPaths) -> None:
    with load(pair) as one, load(pair) as other:
        expected = tokens_of(one)
        mine, theirs = submit(one), submit(other)
        found: dict[str, list[int]] = {"one": [], "other": []}
        while one.busy or other.busy:
            for name, runtime in (("one", one), ("other", other)):
                for output in runtime.step():
                    assert output.request_id in (mine, theirs)
                    found[name] += output.token_ids
        assert found == {"one": expected, "other": expected}


def test_weights_changed_in_place_are_seen_by_the_next_replay(pair: PairPaths) -> None:
    with load(pair) as runtime:
        expected = tokens_of(runtime)
        assert isinstance(runtime.executor, GraphExecutor)
        norm = runtime.executor._weights.vector("norm.weight")
        kept = norm.clone()
        norm.neg_()
        torch.cuda.synchronize()
        changed = tokens_of(runtime)
        norm.copy_(kept)
        torch.cuda.synchronize()
        assert changed != expected
        assert tokens_of(runtime) == expected


def test_an_address_that_nobody_owns_is_refused_by_name(pair: PairPaths) -> None:
    with load(pair) as runtime:
        executor = runtime.executor
        assert isinstance(executor, GraphExecutor)
        groups = [executor.groups(bucket) for bucket in (*runtime.ladder.buckets, *runtime.ladder.first_tokens)]
        executor._check_addresses(groups)
        foreign = torch.zeros(1 << 20, dtype=torch.int64, device="cuda")
        group = groups[0][0]
        call = KernelCall(ADD, (1, 1, 1), (foreign, 1))
        stray = replace(group, calls=(*group.calls, call))
        with pytest.raises(DeviceError, match="trap_add: argument 0 lies in memory that nobody owns"):
            executor._check_addresses([(stray,)])


def test_a_closed_runtime_steps_no_more(pair: PairPaths) -> None:
    runtime = load(pair)
    tokens_of(runtime)
    submit(runtime)
    runtime.close()
    with pytest.raises(LowlatError, match="closed"):
        runtime.step()
    with load(pair) as again:
        assert len(tokens_of(again)) == 60
