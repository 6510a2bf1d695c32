"""Sleep and wake: memory leaves and comes back, tokens and found prefixes stay, refusals change nothing."""

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from recording import prompt_of, run_all
from tiny_models import make_targets

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.engine import sleep
from lowlat.errors import CapacityError, ConfigError, DeviceError, RequestError
from lowlat.executors.residence.host_memory import HostMemory
from lowlat.executors.residence.mapped import AddressSpace, MappedResidence
from lowlat.executors.residence.storages import StorageResidence

CPU = torch.device("cpu")
CHUNK = 16
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_batch": 2,
    "max_context": 200,
    "block_size": 8,
    "prefill_chunk": CHUNK,
    "can_sleep": True,
}
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "gpt_oss": {"sliding_window": 24}, "qwen3_5_text": {"gain": 0.5}}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
PAGE = 4096


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_targets(tmp_path_factory, FAMILIES)


def answer(runtime: Runtime, prompt: list[int]) -> tuple[list[int], int]:
    """The tokens of an answer, and the tokens of its prompt that were found."""
    before = runtime.kvcache.stats().hit_tokens
    name = runtime.submit(prompt, SamplingParams(max_tokens=9, temperature=0.8, seed=3))
    tokens = run_all(runtime)[name]
    runtime.kvcache.invariants()
    return tokens, runtime.kvcache.stats().hit_tokens - before


def paged_bytes(runtime: Runtime) -> int:
    """The memory that paged buffers hold now."""
    state = runtime.executor.state
    paged = [state[name] for name, spec in state.specs.items() if spec.paging is not None]
    return sum(buffer.untyped_storage().nbytes() for buffer in paged)


@pytest.mark.parametrize(("family", "speculative"), [("llama", NGRAM), ("gpt_oss", None), ("qwen3_5_text", NGRAM)])
def test_tokens_and_prefixes_are_the_same_after_sleep(
    targets: dict[str, Path], family: str, speculative: SpeculativeConfig | None
) -> None:
    prompts = [prompt_of(5 * CHUNK + 3), prompt_of(3 * CHUNK + 1, seed=5)]
    with Runtime.load(targets[family], speculative, host_cache_gib=0.1, **OPTIONS) as runtime:
        cold = [answer(runtime, prompt)[0] for prompt in prompts]
        held = paged_bytes(runtime)
        for _ in range(2):
            runtime.sleep()
            assert runtime.asleep and paged_bytes(runtime) == 0 and len(runtime.kvcache) == 0
            with pytest.raises(RequestError, match=r"the runtime sleeps \(Runtime\.sleep\)"):
                runtime.submit(prompts[0])
            runtime.wake()
            assert not runtime.asleep and paged_bytes(runtime) == held
            assert [answer(runtime, prompt) for prompt in prompts] == [(cold[0], 5 * CHUNK), (cold[1], 3 * CHUNK)]
        own = runtime.summary()["sleep"]
        assert own["num_sleeps"] == 2 and own["device_bytes"] == held and not own["asleep"]


def test_without_tiers_prefixes_are_read_again(targets: dict[str, Path]) -> None:
    with Runtime.load(targets["llama"], **OPTIONS) as runtime:
        cold = answer(runtime, prompt_of(50))
        runtime.sleep()
        runtime.sleep()
        runtime.wake()
        runtime.wake()
        assert answer(runtime, prompt_of(50)) == cold


def test_a_runtime_sleeps_between_calls_of_other_threads(targets: dict[str, Path]) -> None:
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=3)
    with Runtime.load(targets["llama"], **OPTIONS) as runtime:
        expected = runtime.generate(prompt_of(50), params).token_ids
        runtime.sleep()
        with pytest.raises(RequestError, match="wake"):
            runtime.generate(prompt_of(50), params)
        runtime.wake()
        assert runtime.generate(prompt_of(50), params).token_ids == expected


def test_refusals_leave_it_as_it_was(targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with Runtime.load(targets["llama"], **{**OPTIONS, "can_sleep": False}) as runtime:
        with pytest.raises(ConfigError, match="can_sleep=True"):
            runtime.sleep()
        assert "sleep" not in runtime.summary()
    with Runtime.load(targets["llama"], **OPTIONS) as runtime:
        expected = answer(runtime, prompt_of(50))[0]
        name = runtime.submit(prompt_of(50), SamplingParams(max_tokens=9, temperature=0.8, seed=3))
        with pytest.raises(CapacityError, match="1 requests are not over"):
            runtime.sleep()
        assert run_all(runtime)[name] == expected
        with monkeypatch.context() as patch:
            patch.setattr(sleep, "available_bytes", lambda device: -1)
            with pytest.raises(CapacityError, match=r"host memory for weights.*stays awake"):
                runtime.sleep()
        assert not runtime.asleep and answer(runtime, prompt_of(50))[0] == expected
        monkeypatch.setattr(runtime.executor.residence, "leave", lambda: (_ for _ in ()).throw(RuntimeError("lost")))
        with pytest.raises(DeviceError, match="failed: lost"):
            runtime.sleep()
        with pytest.raises(DeviceError, match="cannot be used any more"):
            runtime.submit(prompt_of(50))


class Pages(AddressSpace):
    """Addresses of the host whose pages are given back when they are unmapped; `left` pages can be mapped."""

    granularity = PAGE
    num_bytes = 1024 * PAGE

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, self.num_bytes)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.parts: set[tuple[int, int]] = set()
        self.left = 1 << 30
        self.closed = False

    def map(self, start: int, size: int) -> None:
        """See AddressSpace."""
        assert start % PAGE == size % PAGE == 0 and size > 0 and start + size <= self.num_bytes
        assert all(end <= start or begin >= start + size for begin, end in self.spans())
        if size > self.left:
            raise CapacityError("no memory")
        self.left -= size
        self.parts.add((start, size))
        self.bytes[start : start + size] = 0xAB  # what another left there

    def unmap(self, start: int, size: int) -> None:
        """See AddressSpace."""
        self.parts.remove((start, size))
        self.left += size
        self.memory.madvise(mmap.MADV_DONTNEED, start, size)

    def view(self, start: int, size: int) -> torch.Tensor:
        """See AddressSpace."""
        return self.bytes[start : start + size]

    def close(self) -> None:
        """See AddressSpace."""
        assert not self.parts
        self.closed = True

    def spans(self) -> list[tuple[int, int]]:
        """Beginnings and ends of what is mapped."""
        return [(start, start + size) for start, size in self.parts]


def filled() -> tuple[MappedResidence, list[Pages], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """A residence, its address spaces, tensors that are kept with their contents, and tensors that are not."""
    spaces = [Pages(), Pages()]
    waiting = iter(spaces)
    residence = MappedResidence(CPU, lambda device: next(waiting))
    shapes = [((3, 5), torch.bfloat16), ((7,), torch.int64), ((40, PAGE), torch.uint8), ((0,), torch.float32)]
    contents = [torch.randint(0, 100, shape).to(dtype) for shape, dtype in shapes]
    kept = [residence.keep(content) for content in contents]
    dropped = [residence.zeros((2, 9), torch.float32), residence.zeros((3 * PAGE,), torch.uint8)]
    return residence, spaces, contents, kept, dropped


def test_mapped_memory_goes_and_comes_back_at_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowlat.executors.residence.mapped.PIECE_BYTES", 4 * PAGE)
    residence, spaces, contents, kept, dropped = filled()
    addresses = [tensor.data_ptr() for tensor in (*kept, *dropped)]
    assert all(address % 512 == 0 for address in addresses[:3]) and not any(each.any() for each in dropped)
    assert all(torch.equal(content, tensor) for content, tensor in zip(contents, kept, strict=True))
    for number in range(3):
        for tensor in dropped:
            tensor.fill_(7)
        assert residence.needed_host_bytes == (0 if number else residence.report().host_bytes)
        residence.leave()
        residence.leave()
        assert not spaces[0].parts and not spaces[1].parts
        residence.come_back()
        residence.come_back()
        assert len(spaces[0].parts) > 5
        assert all(torch.equal(content, tensor) for content, tensor in zip(contents, kept, strict=True))
        assert not any(each.any() for each in dropped)
    assert [tensor.data_ptr() for tensor in (*kept, *dropped)] == addresses
    with pytest.raises(DeviceError, match="takes no more content"):
        residence.keep(contents[0])
    residence.close()
    assert all(space.closed for space in spaces)


@pytest.mark.parametrize(("which", "left"), [(0, 8 * PAGE), (1, 0)])
def test_memory_that_others_hold_is_refused_and_taken_later(
    which: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowlat.executors.residence.mapped.PIECE_BYTES", 4 * PAGE)
    residence, spaces, contents, kept, dropped = filled()
    residence.leave()
    all_of_it, spaces[which].left = spaces[which].left, left
    with pytest.raises(CapacityError, match="no memory"):
        residence.come_back()
    assert not spaces[0].parts and not spaces[1].parts
    spaces[which].left = all_of_it
    residence.come_back()
    assert all(torch.equal(content, tensor) for content, tensor in zip(contents, kept, strict=True))
    assert not any(each.any() for each in dropped)


def test_host_memory_that_is_refused_leaves_weights_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CapacityError, match=r"host memory for weights are refused"):
        HostMemory(1 << 60, CPU)
    residence, spaces, contents, kept, _ = filled()

    def refuse(num_bytes: int, device: torch.device) -> HostMemory:
        raise CapacityError("refused")

    monkeypatch.setattr("lowlat.executors.residence.mapped.HostMemory", refuse)
    with pytest.raises(CapacityError, match="refused"):
        residence.leave()
    assert spaces[0].parts and all(torch.equal(content, tensor) for content, tensor in zip(contents, kept, strict=True))


def test_storages_are_given_back_and_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    residence = StorageResidence(torch.device("meta"))  # a device other than the CPU, whose copies are looked at below
    assert residence.keep(torch.empty(4, device="meta")).shape == (4,) and residence.needed_host_bytes == 16
    residence = StorageResidence(CPU)
    residence.device = torch.device("cuda")  # only whether to wait depends on it
    content = torch.arange(24.0).view(4, 6)
    kept = residence.keep(content.clone().t())
    residence.device = CPU
    dropped = residence.zeros((3, 4), torch.float32)
    view = dropped[1:]
    dropped.fill_(5)
    residence.leave()
    assert kept.untyped_storage().nbytes() == dropped.untyped_storage().nbytes() == 0
    residence.come_back()
    assert torch.equal(kept, content.t()) and not view.any() and view.data_ptr() != 0
    residence.close()
