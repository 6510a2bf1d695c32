"""`lowlat profile` without a GPU: recordings, bytes, what ranks exchange, refusals, NVTX ranges."""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from profiling_cases import cover, cover_ranks, record_of, recorded
from stages import wide
from tiny_models import make_target, mxfp4_target

from lowlat import Runtime, SpeculativeConfig
from lowlat.cli.options import bundled
from lowlat.errors import ConfigError, LowlatError
from lowlat.executors.eager import EagerExecutor
from lowlat.graphs import Bucket
from lowlat.graphs.program import OWN_NAMES, Program, Stage
from lowlat.kernels.formats import FORMATS
from lowlat.kernels.toolchain.kernel import H200
from lowlat.lowering.lower import LoweredGroup
from lowlat.tools.profile import recording as profiling
from lowlat.tools.profile.report import summarise
from lowlat.tools.profile.sites import call_sites
from lowlat.tools.profile.times import KernelEvent, attribute


class FakeEvent(SimpleNamespace):
    """An event as torch's profiler gives it."""

    def __init__(self, name: str, device: str = "CUDA", index: int = 0) -> None:
        super().__init__(
            name=name,
            device_type=SimpleNamespace(name=device),
            device_index=index,
            time_range=SimpleNamespace(start=1.5, end=2.5),
        )


def test_only_this_package_s_kernels_of_this_device_count() -> None:
    mangled = "_ZN6lowlat7kernels5embed11_make_embed12_3clocals_3e5embedB2v1B92cw51"
    events = [
        *(FakeEvent(mangled), FakeEvent("lowlat::kernels::sample::_make_draw"), FakeEvent("Memcpy HtoD")),
        *(FakeEvent("at::native::fill"), FakeEvent(mangled, "CPU"), FakeEvent(mangled, index=1)),
    ]
    found = profiling.own_kernels(events, 0)
    assert [event.name for event in found] == [mangled, "lowlat::kernels::sample::_make_draw"]
    assert (found[0].start_us, found[0].end_us) == (1.5, 2.5)


Covered = tuple[Runtime, Callable[[Bucket], tuple[LoweredGroup, ...]]]


@pytest.fixture(scope="module")
def loaded() -> Iterator[Covered]:
    """The bundled pair on the CPU, and how kernels would cover its steps."""
    config = SpeculativeConfig(model=bundled("head"), num_speculative_tokens=2)
    with Runtime.load(bundled("target"), config, max_batch=2, max_context=256, device="cpu") as runtime:
        yield runtime, cover(runtime, bundled("target"), bundled("head"))


@pytest.fixture
def covered(loaded: Covered) -> Iterator[Covered]:
    """The same, left without requests."""
    yield loaded
    while loaded[0].busy:
        loaded[0].step()


def test_bytes_are_those_of_weights_and_caches(covered: Covered) -> None:
    runtime, groups = covered
    config, head = runtime.model_config, runtime.draft_config
    assert head is not None
    bucket = runtime.scheduler.ladder.choose(2, 2)
    lengths = (101, 41)
    sites = call_sites(groups(bucket), runtime.executor.state, [lengths])
    rows = {row.stage: row for row in summarise(attribute(recorded(sites, 1), sites), 1.0).stages}
    hidden, kv_size = config.hidden_size, config.attention.kv_size
    layer = hidden * (hidden + 2 * kv_size) + hidden * hidden + 3 * hidden * config.ffn.inner_size
    weights = 2 * (config.num_layers * layer + config.vocab_size * hidden)
    caches = config.num_layers * (100 + 40) * 2 * kv_size * 2
    assert rows["VERIFY"].moved_bytes == weights + caches
    assert rows["DRAFT_FC"].moved_bytes == 2 * hidden * len(head.capture_boundaries) * hidden
    assert rows["DRAFT_FFN"].moved_bytes == 2 * 2 * 3 * hidden * head.ffn.inner_size
    assert rows["DRAFT_LM_HEAD"].moved_bytes == 2 * 2 * hidden * head.draft_vocab_size
    queries, head_kv = head.attention.query_size, head.attention.kv_size
    attention = 2 * hidden * (queries + 2 * head_kv) + queries * hidden
    dense = (99 + 39) * 2 * head_kv * 2  # the head's first position is never attended to
    assert rows["DRAFT_ATTENTION_FMHA"].moved_bytes == 2 * (2 * attention + dense)
    assert rows["COMMIT"].within == "ACCEPT"
    assert rows["PUBLISH"].within == "TREE_MASKS"
    assert list(rows) == [stage for stage in Stage if stage not in (Stage.PREFILL, Stage.DRAFT)]


@pytest.mark.parametrize("name", ["bf16", "mxfp4"])
def test_chosen_experts_bytes_are_counted_as_their_format_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64, "num_hidden_layers": 2}
    moe = {"num_local_experts": 9, "num_experts_per_tok": 4}
    if name == "mxfp4":
        mxfp4_target(tmp_path, **sizes, **moe)
    else:
        make_target(tmp_path, "gpt_oss", **sizes, **moe)
    expert = FORMATS[name].packed_bytes(2 * 96, 64) + FORMATS[name].packed_bytes(64, 96)
    options: dict[str, Any] = {"max_batch": 2, "max_context": 256, "device": "cpu", "dtype": "bfloat16"}
    with Runtime.load(tmp_path, **options) as runtime:
        bucket, groups = runtime.scheduler.ladder.choose(2, 0), cover(runtime, tmp_path, None)
        sites = [call_sites(groups(bucket), runtime.executor.state, [[20, 20]], count) for count in (0, 3.5)]
        none, some = ([site.moved_bytes for site in each] for each in sites)
        added = [more - less for less, more in zip(none, some, strict=True) if more != less]
        assert sum(added) == 2 * 3.5 * expert  # two layers

        lengths = profiling.start_decoding(runtime, profiling.random_prompts(97, 2, 20), 40)
        monkeypatch.setattr(runtime.executor, "groups", groups, raising=False)
        chosen, count = [], profiling.chosen_experts

        def counted(runtime: Runtime, bucket: Bucket) -> float:
            chosen.append(count(runtime, bucket))
            return chosen[-1]

        monkeypatch.setattr(profiling, "chosen_experts", counted)
        record = record_of(groups, bucket, profiling.LEAD + 2)
        profile = profiling.profile_steps(runtime, lengths, 2, None, record)
        assert len(chosen) == profiling.WARM_UP and all(4 <= each <= 8 for each in chosen)
        bare = call_sites(groups(bucket), runtime.executor.state, [profile.contexts])
        moved = profile.summary.moved_bytes - sum(site.moved_bytes for site in bare)
        assert moved == pytest.approx(2 * expert * sum(chosen) / len(chosen), rel=0.05)


@pytest.mark.second
def test_steps_are_those_that_were_recorded(covered: Covered, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, groups = covered
    monkeypatch.setattr(runtime.executor, "groups", groups, raising=False)
    bucket = runtime.scheduler.ladder.choose(2, 2)
    room = profiling.find_room(150, 256, batch=2, num_speculative_tokens=2, num_steps=3, prefill_chunk=128)
    assert room.max_context <= 256
    prompts = profiling.random_prompts(runtime.model_config.vocab_size, 2, room.prompt_length)
    assert prompts[0] != prompts[1]
    updates: list[tuple[int, int]] = []
    lengths = profiling.start_decoding(runtime, prompts, room.max_tokens, lambda *done: updates.append(done))
    assert updates[-1][0] <= updates[-1][1]
    assert runtime.scheduler.num_active == 2
    profile = profiling.profile_steps(runtime, lengths, 3, 4500.0, record_of(groups, bucket, profiling.LEAD + 3))
    assert profile.bucket == bucket
    assert (len(profile.steps), profile.summary.num_steps) == (3, 3)
    assert profile.host_us > 0
    for name, before in zip(lengths, profile.contexts, strict=True):
        assert room.prompt_length < before < lengths[name]
        assert runtime.metrics(name).completion_tokens == lengths[name] - room.prompt_length
    values = json.loads(json.dumps(profile.to_dict(), allow_nan=False))
    assert values["step_us"] == pytest.approx(10.0 * values["num_launches"])
    assert profile.gpus == () and "cards" not in values and "all_reduce" not in values


@pytest.mark.parametrize("fused", [True, wide(False)])
@pytest.mark.second
def test_every_rank_tells_what_it_all_reduces(fused: bool, covered: Covered, monkeypatch: pytest.MonkeyPatch) -> None:
    """GEMMs that exchange their sums as they finish, or launches of their own; and waits for the other one."""
    runtime, _ = covered
    bucket = runtime.scheduler.ladder.choose(1, 2)
    config = SpeculativeConfig(model=bundled("head"), num_speculative_tokens=2)
    ranks = cover_ranks(runtime, config, 2, replace(H200, is_shared=not fused))
    monkeypatch.setattr(runtime.executor, "ranks", ranks, raising=False)
    groups = ranks[0].groups(bucket)
    all_reduces = [op for group in groups for op in group.ops if op.kind == "gather_ranks"]
    named: list[list[str]] = []

    def record(run: Callable[[], None], devices: Any) -> list[list[KernelEvent]]:
        assert devices == [torch.device("cuda", 0), torch.device("cuda", 1)]
        found = []
        for rank, us in zip(ranks, (10.0, 12.0), strict=True):
            one = record_of(rank.groups, bucket, profiling.LEAD + 2)(lambda: None, devices[:1])[0]
            found.append([replace(event, start_us=us * event.start_us, end_us=us * event.end_us) for event in one])
            named.append([event.name for event in one])
        run()
        return found

    lengths = profiling.start_decoding(runtime, profiling.random_prompts(90, 1, 20), 60)
    profile = profiling.profile_steps(runtime, lengths, 2, None, record)
    first, second = profile.gpus
    all_reduce = profile.summary.all_reduce
    assert all_reduce is not None and (first.device, second.device) == ("cuda:0", "cuda:1")
    assert all_reduce.num_launches + all_reduce.num_fused == len(all_reduces) + 1  # and the commands
    products = sum(group.name == "gemm+all_reduce" for group in groups)
    assert all_reduce.num_fused == products and (products > 0) == fused
    alone = sum("::all_reduce" in name or "::forward_commands" in name for name in named[0]) // (profiling.LEAD + 2)
    assert all_reduce.num_launches == alone
    assert all_reduce.time_us == pytest.approx(100.0 * alone) == first.all_reduce_us
    assert second.all_reduce_us == pytest.approx(1.2 * first.all_reduce_us)
    assert second.fused_us == pytest.approx(1.2 * all_reduce.fused_us)
    values = json.loads(json.dumps(profile.to_dict(), allow_nan=False))
    assert [each["device"] for each in values["cards"]] == ["cuda:0", "cuda:1"]
    assert values["all_reduce"]["num_fused"] == all_reduce.num_fused


def test_a_request_that_ends_is_an_error(covered: Covered) -> None:
    runtime, groups = covered
    lengths = profiling.start_decoding(runtime, profiling.random_prompts(90, 1, 5), 8)
    with pytest.raises(LowlatError, match=r"ended early \(length\): no error"):
        profiling.profile_steps(runtime, lengths, 9, None, record_of(groups, Bucket(1, 3, 2), 1))
    with pytest.raises(LowlatError, match="ended early"):
        profiling.start_decoding(runtime, profiling.random_prompts(90, 2, 140), 1)


def test_room_is_what_the_model_has() -> None:
    sizes = {"batch": 4, "num_speculative_tokens": 3, "num_steps": 10, "prefill_chunk": 128}
    roomy = profiling.find_room(8192, 131072, **sizes)
    assert roomy.prompt_length == 8192
    assert roomy.max_tokens > 4 * 64 + 4 * (profiling.WARM_UP + profiling.LEAD + 20)
    tight = profiling.find_room(2048, 2048, **sizes)
    assert tight.max_context == 2048
    assert tight.prompt_length < 2048
    with pytest.raises(ConfigError, match="the model has 100 positions"):
        profiling.find_room(64, 100, **sizes)


def test_without_a_gpu_there_is_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowlat.executors.devices.nvidia_gpu_present", lambda: False)
    with pytest.raises(ConfigError, match=r"lowlat profile needs an NVIDIA GPU, .*: no NVIDIA GPU is present"):
        profiling.choose_gpu("auto", "graph")
    with pytest.raises(ConfigError, match=r"lowlat profile needs an NVIDIA GPU, .*: the CPU was asked for"):
        profiling.choose_gpu("cpu", "graph")
    with pytest.raises(ConfigError, match="device must be"):
        profiling.choose_gpu("tpu", "graph")


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
@pytest.mark.parametrize("executor", ["graph", "eager"])
def test_with_a_gpu_it_is_that_gpu(device: str, executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowlat.executors.devices.nvidia_gpu_present", lambda: True)
    monkeypatch.setattr("lowlat.executors.devices._cuda_problem", lambda _index: None)
    choice = profiling.choose_gpu(device, executor)
    assert (choice.device, choice.has_kernels) == (torch.device("cuda", 0), True)


class Ranges:
    """This fake records the ranges pushed and popped, and the kernels launched, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.open: list[str] = []
        monkeypatch.setattr(torch.cuda.nvtx, "range_push", self._push)
        monkeypatch.setattr(torch.cuda.nvtx, "range_pop", self._pop)
        monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())

    def _push(self, name: str) -> None:
        self.log.append(name)
        self.open.append(name)

    def _pop(self) -> None:
        self.log.append("pop")
        self.open.pop()


def eager(program: Program, groups: tuple[LoweredGroup, ...], launch: Callable[[str, str], None]) -> EagerExecutor:
    """An eager executor of these groups whose launches call `launch` with their range and their kernel."""
    executor = EagerExecutor.__new__(EagerExecutor)
    executor._programs = dict.fromkeys((Bucket(1, 3, 2),), program)
    executor.stream, executor._hook = SimpleNamespace(), None  # type: ignore[assignment]
    executor._prepared = {}
    executor.launcher = SimpleNamespace(stream=lambda: None)  # type: ignore[assignment]

    def prepare(_bucket: Bucket) -> Any:
        return [
            (
                group,
                [
                    SimpleNamespace(
                        issue=lambda _stream, call=call, group=group: launch(
                            program.range_name(group.stage), call.kernel.name
                        )
                    )
                    for call in group.calls
                ],
            )
            for group in groups
        ]

    executor.prepare = prepare  # type: ignore[assignment,method-assign]
    return executor


def test_nvtx_ranges_are_the_stages_in_order(covered: Covered, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, cover_groups = covered
    bucket = runtime.scheduler.ladder.choose(1, 2)
    groups = cover_groups(bucket)
    ranges, launched = Ranges(monkeypatch), []

    def launch(name: str, kernel: str) -> None:
        assert ranges.open == [name]
        launched.append(kernel)

    program = runtime.executor.program(bucket)
    eager(program, groups, launch).step(bucket)
    assert launched == [call.kernel.name for group in groups for call in group.kernel_calls]
    names = ranges.log[::2]
    assert ranges.log[1::2] == ["pop"] * len(names)
    assert not ranges.open
    assert all(before != after for before, after in pairwise(names))
    stages = [stage for stage in Stage if stage in {group.stage for group in groups}]
    assert list(dict.fromkeys(names)) == [program.range_name(stage) for stage in stages]
    assert names[:3] == ["ACTIVE_SLOTS", "BASE_DECODE_STEP", "EAGLE_ACCEPT"] and "EAGLE_DRAFT_ATTENTION_FMHA" in names
    assert not any("EAGLE" in replace(program, range_names=OWN_NAMES).range_name(stage) for stage in Stage)


@pytest.mark.parametrize("failing", [0, 5, 60, -1])
def test_nvtx_ranges_balance_when_a_launch_fails(
    failing: int, covered: Covered, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, cover_groups = covered
    bucket = runtime.scheduler.ladder.choose(1, 2)
    groups = cover_groups(bucket)
    ranges, count = Ranges(monkeypatch), 0
    last = sum(len(group.calls) for group in groups) - 1

    def launch(_stage: str, _kernel: str) -> None:
        nonlocal count
        count += 1
        if count - 1 == (failing if failing >= 0 else last):
            raise RuntimeError("out of resources")

    with pytest.raises(RuntimeError, match="out of resources"):
        eager(runtime.executor.program(bucket), groups, launch).step(bucket)
    assert not ranges.open
    assert ranges.log.count("pop") == len(ranges.log) // 2
