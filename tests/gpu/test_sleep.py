"""Sleep and wake on a GPU: captured graphs go on as they were, and the memory is truly free meanwhile."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from recording import prompt_of, run_all
from tiny_models import KERNEL_HYBRID, make_pair, make_target

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.errors import CapacityError
from lowlat.executors.residence.host_memory import HostMemory
from lowlat.executors.residence.mapped import CudaAddressSpace, MappedResidence

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
SAMPLED = SamplingParams(max_tokens=40, temperature=0.9, seed=11)
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "vocab_size": 512} | {
    "max_position_embeddings": 2048
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": SIZES | {"head_dim": 128},
    "qwen3_5_text": SIZES | KERNEL_HYBRID | {"gain": 0.4},
    "gpt_oss": {"sliding_window": 64, "head_dim": 64, "hidden_size": 64, "intermediate_size": 96}
    | {"max_position_embeddings": 2048},
}
OPTIONS: dict[str, Any] = {"max_batch": 4, "max_context": 700, "block_size": 32, "prefill_chunk": 64} | {
    "dtype": "bfloat16",
    "max_prefill_chunks": 4,
    "device": "cuda",
    "host_cache_gib": 0.5,
}
MIB = 1 << 20


def answers(runtime: Runtime) -> list[list[int]]:
    """The tokens of three answers that share the runtime."""
    names = [runtime.submit(prompt_of(count, seed=count), SAMPLED) for count in (300, 450, 390)]
    found = run_all(runtime)
    runtime.kvcache.invariants()
    return [found[name] for name in names]


def free_bytes() -> int:
    """Free memory of the GPU."""
    torch.cuda.synchronize(GPU)
    return int(torch.cuda.mem_get_info(GPU)[0])


@pytest.mark.parametrize("executor", ["graph", "eager", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_stay_the_same_after_sleep(family: str, executor: str, tmp_path: Path) -> None:
    make_target(tmp_path / "target", family, **FAMILIES[family])
    options = {**OPTIONS, "executor": executor}
    with Runtime.load(tmp_path / "target", **options) as runtime:
        expected = answers(runtime)
    ngram = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
    for speculative in (None, ngram):
        with Runtime.load(tmp_path / "target", speculative, can_sleep=True, **options) as runtime:
            assert answers(runtime) == expected
            for number in range(2):
                runtime.sleep()
                runtime.wake()
                before = runtime.kvcache.stats().hit_tokens
                assert answers(runtime) == expected, number
                assert runtime.kvcache.stats().hit_tokens - before >= 3 * 256


@pytest.mark.parametrize("device_loop", [False, True])
def test_graphs_with_a_draft_model_go_on_after_sleep(device_loop: bool, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "llama", hidden_size=64, intermediate_size=96, head_dim=64)
    eagle = SpeculativeConfig(method="eagle3", model=pair.head, num_speculative_tokens=3)
    options = {**OPTIONS, "max_context": 160, "prefill_chunk": 32, "device_loop": device_loop}

    def tokens(runtime: Runtime) -> list[int]:
        name = runtime.submit(prompt_of(90), SAMPLED)
        return run_all(runtime)[name]

    with Runtime.load(pair.target, eagle, **options) as runtime:
        expected = tokens(runtime)
    with Runtime.load(pair.target, eagle, can_sleep=True, **options) as runtime:
        assert tokens(runtime) == expected
        runtime.sleep()
        runtime.wake()
        assert tokens(runtime) == expected


def test_memory_is_free_while_it_sleeps(tmp_path: Path) -> None:
    make_target(tmp_path / "target", "qwen3", **FAMILIES["qwen3"] | {"vocab_size": 200_000, "hidden_size": 1024})
    with Runtime.load(tmp_path / "target", can_sleep=True, **{**OPTIONS, "kv_blocks": 4000}) as runtime:
        tokens = answers(runtime)
        torch.cuda.empty_cache()  # of what packing took
        own, awake = runtime.summary()["sleep"], free_bytes()
        for _ in range(2):
            runtime.sleep()
            assert free_bytes() - awake >= own["device_bytes"] - 64 * MIB
            filler = torch.full((own["device_bytes"] // 2,), 0xFF, dtype=torch.uint8, device=GPU)  # others use it
            del filler
            torch.cuda.empty_cache()
            runtime.wake()
            assert abs(free_bytes() - awake) <= 64 * MIB
            assert answers(runtime) == tokens
    torch.cuda.empty_cache()


def test_memory_that_another_holds_is_refused_and_taken_later(tmp_path: Path) -> None:
    make_target(tmp_path / "target", "qwen3", **FAMILIES["qwen3"])
    with Runtime.load(tmp_path / "target", can_sleep=True, **{**OPTIONS, "kv_blocks": 20_000}) as runtime:
        expected = answers(runtime)
        runtime.sleep()
        torch.cuda.empty_cache()
        size = free_bytes() - 256 * MIB
        other = torch.empty(size, dtype=torch.uint8, device=GPU)
        with pytest.raises(CapacityError, match="others hold the rest"):
            runtime.wake()
        assert runtime.asleep
        del other
        torch.cuda.empty_cache()
        runtime.wake()
        assert answers(runtime) == expected


def test_a_wake_takes_hardly_longer_than_the_copy() -> None:
    """Of 2 GiB, so that what a mapping costs shows."""
    size = 2 << 30
    residence = MappedResidence(GPU)
    pattern = torch.arange(size // 8 // 64, dtype=torch.int64, device=GPU)
    kept = [residence.keep(pattern + number) for number in range(64)]
    residence.zeros((size,), torch.uint8)
    before, times = free_bytes(), []
    for _ in range(4):
        residence.leave()
        assert free_bytes() - before >= 2 * size - 64 * MIB
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        residence.come_back()
        end.record()
        torch.cuda.synchronize(GPU)
        times.append(begin.elapsed_time(end))
        assert all(torch.equal(tensor, pattern + number) for number, tensor in enumerate(kept))
    host, there = HostMemory(size, GPU), torch.empty(size, dtype=torch.uint8, device=GPU)
    copies = []
    for _ in range(4):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        there.copy_(host.bytes, non_blocking=True)
        end.record()
        torch.cuda.synchronize(GPU)
        copies.append(begin.elapsed_time(end))
    host.close()
    residence.close()
    assert min(times[1:]) <= 1.3 * min(copies[1:]), (times, copies)


def test_addresses_are_given_back() -> None:
    before = free_bytes()
    for _ in range(3):
        residence = MappedResidence(GPU)
        residence.keep(torch.zeros(100 * MIB, dtype=torch.uint8, device=GPU))
        residence.close()
        torch.cuda.empty_cache()
    assert before - free_bytes() <= 64 * MIB
    space = CudaAddressSpace(GPU)
    assert space.granularity % 4096 == 0 and space.num_bytes >= torch.cuda.get_device_properties(GPU).total_memory
    space.close()


FAILING = """
import os, sys, torch
from lowlat import Runtime
from lowlat.errors import DeviceError
runtime = Runtime.load(sys.argv[1], can_sleep=True, device="cuda", max_batch=1, max_context=200, dtype="bfloat16")
try:
    index = torch.full((4,), 1 << 40, dtype=torch.int64, device="cuda")
    torch.zeros(4, device="cuda")[index]  # an assertion on the device: its context is lost
    runtime.sleep()
except DeviceError as error:
    print("DeviceError:", str(error).splitlines()[0], flush=True)
    try:
        runtime.close()  # closes all, and then says what failed
    except DeviceError as error:
        print("closed with DeviceError:", str(error).splitlines()[0], flush=True)
os._exit(0)  # torch ends a process whose memory it frees on a lost device
"""


def test_a_lost_device_ends_a_sleep_by_name(tmp_path: Path) -> None:
    make_target(tmp_path / "target", "qwen3", **FAMILIES["qwen3"])
    command = [sys.executable, "-c", FAILING, str(tmp_path / "target")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    slept, closed = ended.stdout.splitlines()
    assert slept.startswith("DeviceError: the device cuda:0 failed"), ended.stderr
    assert closed.startswith("closed with DeviceError: the device cuda:0 failed"), ended.stderr
