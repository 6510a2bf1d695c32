"""The tiers of the prefix cache: a prompt goes on from what another process read, with the tokens of a cold start."""

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recording import prompt_of, run_all
from safetensors.torch import save_file
from stages import later, staged
from tier_cases import Pages, files_of, host_tier, key, memory
from tiny_grammars import Breaking, submit_with
from tiny_models import make_targets

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.checkpoint.files import written_whole
from lowlat.checkpoint.tensors import read_header
from lowlat.engine.numerics import digest_of
from lowlat.engine.scheduling.tiers import _files
from lowlat.errors import ConfigError, DeviceError, SessionError
from lowlat.sequence import window_book
from lowlat.sequence.kvcache import KVCache
from lowlat.sequence.tiers.arena import ALIGNMENT
from lowlat.sequence.tiers.disk import DiskTier
from lowlat.sequence.tiers.key import COMING, ChunkKey, Load, Save
from lowlat.sequence.tiers.tiers import CacheTiers
from lowlat.sequence.window_book import WindowBook
from lowlat.sequence.window_pool import WindowPool

CHUNK = 16
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_batch": 2,
    "max_context": 200,
    "block_size": 8,
    "prefill_chunk": CHUNK,
    "max_prefill_chunks": 4,
}
# full attention alone, with windows, with recurrent states
CUT = {"linear_num_value_heads": 8, "linear_value_head_dim": 16, "num_attention_heads": 8, "head_dim": 16}  # in ranks
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "gpt_oss": {"sliding_window": 24}}
FAMILIES["qwen3_5_text"] = {"gain": 0.5, **CUT}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
SAMPLED = SamplingParams(max_tokens=9, temperature=0.8, seed=3)
KEY = ChunkKey(b"k" * 32, "")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_targets(tmp_path_factory, FAMILIES)


def answer(runtime: Runtime, prompt: list[int], **options: Any) -> tuple[list[int], int]:
    """The tokens of an answer next to a neighbour's, and the tokens of both prompts that were found."""
    before = runtime.kvcache.stats().hit_tokens
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=3)
    name = runtime.submit(prompt, params, **options)
    other = runtime.submit(prompt_of(20, seed=7), params)
    tokens = run_all(runtime)
    runtime.kvcache.invariants()
    return tokens[name] + tokens[other], runtime.kvcache.stats().hit_tokens - before


@pytest.mark.parametrize(
    ("family", "speculative"),
    [later(family, None) if number else (family, NGRAM) for number, family in enumerate(FAMILIES)],
)
def test_another_process_goes_on_from_the_files(
    targets: dict[str, Path], family: str, speculative: SpeculativeConfig | None, tmp_path: Path
) -> None:
    prompt, longer = prompt_of(5 * CHUNK + 3), prompt_of(5 * CHUNK + 3) + prompt_of(30, seed=9)
    options = {**OPTIONS, "cache_dir": tmp_path / "cache"}
    with Runtime.load(targets[family], speculative, prefix_reuse=False, **OPTIONS) as runtime:
        cold = [answer(runtime, each)[0] for each in (prompt, longer)]
    with Runtime.load(targets[family], speculative, **options) as runtime:
        assert answer(runtime, prompt) == (cold[0], 0)
    with Runtime.load(targets[family], speculative, **options) as runtime:
        assert answer(runtime, longer) == (cold[1], 5 * CHUNK + CHUNK)  # the neighbour's chunk, too
        assert answer(runtime, prompt, cache_salt="another") == (cold[0], CHUNK)
        tiers = runtime.summary()["kv"]["tiers"]
        assert tiers["read"] >= 6 and tiers["disk_bytes"] > 0 and tiers["misses"] == 0


@pytest.mark.second
@pytest.mark.parametrize("family", staged(FAMILIES, first=["llama"], second=[]))
def test_ranks_keep_their_contents_together(targets: dict[str, Path], family: str, tmp_path: Path) -> None:
    """In files, in host memory, and in a session's file; those of another number of ranks are none."""
    prompt, two = prompt_of(5 * CHUNK + 3), {**OPTIONS, "tensor_parallel_size": 2, "tp_invariant": True}
    with Runtime.load(targets[family], prefix_reuse=False, **two) as runtime:
        cold = answer(runtime, prompt)[0]
        name = runtime.submit(prompt, SAMPLED)
        alone = run_all(runtime)[name]
        name = runtime.submit([*prompt, *alone, 1], SAMPLED)
        later = run_all(runtime)[name]
    two |= {"cache_dir": tmp_path / "cache"}
    with Runtime.load(targets[family], can_sleep=True, **two) as runtime:
        assert answer(runtime, prompt) == (cold, 0)
        session = runtime.session("kept")
        name = runtime.submit(prompt, SAMPLED, session=session)
        assert run_all(runtime)[name] == alone
        session.save(tmp_path / "kept")
        runtime.sleep()
        assert runtime.summary()["sleep"]["asleep"]
        runtime.wake()
        assert answer(runtime, prompt) == (cold, 6 * CHUNK)
    with Runtime.load(targets[family], **two) as runtime:
        assert answer(runtime, prompt) == (cold, 6 * CHUNK)
    del two["cache_dir"]
    with Runtime.load(targets[family], **two) as runtime:
        session = runtime.load_session(tmp_path / "kept")
        name = runtime.submit([*session.token_ids, 1], SAMPLED, session=session)
        assert run_all(runtime)[name] == later and runtime.kvcache.stats().hit_tokens == 5 * CHUNK
    with Runtime.load(targets[family], **{**OPTIONS, "tp_invariant": True, "cache_dir": tmp_path / "cache"}) as runtime:
        assert answer(runtime, prompt)[1] == 0
        with pytest.raises(SessionError, match=r"another layout|numerics"):
            runtime.load_session(tmp_path / "kept")


@pytest.mark.parametrize("family", staged(FAMILIES, first=["llama"]))
def test_what_the_device_lets_go_of_comes_back_from_host_memory(targets: dict[str, Path], family: str) -> None:
    prompts = [prompt_of(5 * CHUNK + 3, seed=seed) for seed in range(4)]
    small = {**OPTIONS, "max_batch": 1, "kv_blocks": 27, "state_cache_gib": 0.0001}
    with Runtime.load(targets[family], host_cache_gib=0.1, **small) as runtime:
        cold = [answer(runtime, prompt)[0] for prompt in prompts]
        again = [answer(runtime, prompt) for prompt in prompts[:3]]
        assert again == [(tokens, 6 * CHUNK) for tokens in cold[:3]]


@pytest.mark.parametrize("way", ["open", "grammar"])
def test_chunks_that_an_admission_found_are_held_no_longer_than_their_copies(
    targets: dict[str, Path], way: str
) -> None:
    """Host memory has no space for them; the request that found them runs no chunk, and another needs all blocks."""
    short, params = prompt_of(CHUNK + 1), SamplingParams(max_tokens=2, seed=1)
    with Runtime.load(targets["llama"], host_cache_gib=1e-6, kv_blocks=27, **OPTIONS) as runtime:
        runtime.submit(short, params)
        run_all(runtime)
        if way == "open":
            opened = runtime.open_prompt(params)
            opened.append(short)
            runtime.step()
            opened.cancel()
        else:
            submit_with(runtime, Breaking({0: {1: 0}}, 0), short, params)
            runtime.step()
        assert runtime._tiers is not None
        runtime._tiers.flush()
        large = runtime.submit(prompt_of(150, seed=3), SamplingParams(max_tokens=50, ignore_eos=True))
        outputs = [output for _ in range(80) for output in runtime.step()]
        assert sum(len(output.token_ids) for output in outputs if output.request_id == large) == 50
        assert not runtime.busy
        assert runtime.kvcache.stats().num_used == 0


def test_damaged_files_are_read_again_by_prefill_with_one_warning(
    targets: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**OPTIONS, "cache_dir": tmp_path / "cache"}
    prompt = prompt_of(5 * CHUNK + 3)
    with Runtime.load(targets["llama"], **options) as runtime:
        expected = answer(runtime, prompt)[0]
    for path in files_of(tmp_path):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with caplog.at_level(logging.WARNING), Runtime.load(targets["llama"], **options) as runtime:
        assert answer(runtime, prompt) == (expected, 0)
    assert len([record for record in caplog.records if "cached prefix" in record.message]) == 1
    with Runtime.load(targets["llama"], **options) as runtime:  # all of each chain has been written again
        assert answer(runtime, prompt) == (expected, 6 * CHUNK)


@pytest.mark.parametrize("when", ["started", "under way"])
def test_a_copy_that_fails_is_a_miss(
    targets: dict[str, Path], when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No request goes on from blocks whose content did not come; it is read by prefill, and kept again."""
    prompt = prompt_of(5 * CHUNK + 3)
    with Runtime.load(targets["llama"], host_cache_gib=0.01, can_sleep=True, **OPTIONS) as runtime:
        cold = answer(runtime, prompt)[0]
        tiers = runtime.kvcache.tiers
        assert tiers is not None

        def fails(*_: object) -> Callable[[], None]:
            raise DeviceError("a copy was refused")

        for hits in (0, 6 * CHUNK):
            runtime.sleep()
            runtime.wake()
            with monkeypatch.context() as patch, caplog.at_level("WARNING"):
                if not hits:
                    patch.setattr(tiers._copier, "start_in", fails if when == "started" else lambda *_: fails)
                assert answer(runtime, prompt) == (cold, hits)
                tiers.flush()
        assert "a copy was refused" in caplog.text and runtime.kvcache.stats().num_used == 0
        runtime.kvcache.invariants()


def test_what_differs_in_bits_is_nobodys_hit(targets: dict[str, Path], tmp_path: Path) -> None:
    options, prompt = {**OPTIONS, "cache_dir": tmp_path / "cache"}, prompt_of(5 * CHUNK + 3)
    with Runtime.load(targets["llama"], **options) as runtime:
        answer(runtime, prompt)
    for other in ({"dtype": "bfloat16"}, {"prefill_chunk": 32}):
        with Runtime.load(targets["llama"], **{**options, **other}) as runtime:
            assert answer(runtime, prompt)[1] == 0
    weights = targets["llama"] / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-8] + b"\0" * 8)
    try:
        with Runtime.load(targets["llama"], **options) as runtime:
            assert answer(runtime, prompt)[1] == 0
    finally:
        weights.write_bytes(kept)


def test_one_tensor_that_was_edited_makes_another_model(targets: dict[str, Path], tmp_path: Path) -> None:
    """Samples of its file may all lie elsewhere: each tensor's ends are looked at, too."""
    model, options = tmp_path / "model", {**OPTIONS, "cache_dir": tmp_path / "cache"}
    shutil.copytree(targets["llama"], model)
    prompt = prompt_of(5 * CHUNK + 3)
    with Runtime.load(model, **options) as runtime:
        session = runtime.session("agent")
        name = runtime.submit(prompt, SAMPLED, session=session)
        assert len(run_all(runtime)[name]) == 9
        session.save(tmp_path / "kept")
    weights = model / "model.safetensors"
    entry = read_header(weights)["model.layers.0.self_attn.k_proj.weight"]
    data, kept = bytearray(weights.read_bytes()), weights.stat()
    stop = entry.offset + entry.num_bytes
    data[entry.offset : stop] = np.frombuffer(data[entry.offset : stop], np.uint32)[::-1].tobytes()
    weights.write_bytes(data)
    os.utime(weights, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    with Runtime.load(model, prefix_reuse=False, **OPTIONS) as runtime:
        cold = answer(runtime, prompt)[0]
    with Runtime.load(model, **options) as runtime:
        with pytest.raises(SessionError, match="whose files are not those of"):
            runtime.load_session(tmp_path / "kept")
        assert answer(runtime, prompt) == (cold, 0)


def test_samples_lie_in_every_tensor(tmp_path: Path) -> None:
    """Of a file so large that places all over it miss most of its tensors; any one of them changed is another model."""
    path = tmp_path / "model.safetensors"
    save_file({f"weight.{number}": torch.zeros(6000) for number in range(300)}, path)
    size, before = path.stat().st_size, sampled(path)
    data = path.read_bytes()
    for entry in list(read_header(path).values())[::37]:
        changed = bytearray(data)
        changed[entry.offset : entry.offset + entry.num_bytes] = b"\1" * entry.num_bytes
        path.write_bytes(changed)
        assert path.stat().st_size == size and sampled(path) != before
    path.write_bytes(b"not loaded, and no safetensors at all")
    assert sampled(path) != before


def sampled(path: Path) -> str:
    return digest_of({"files": _files(path.parent)})


def test_what_a_nan_touched_is_taken_out(targets: dict[str, Path], tmp_path: Path) -> None:
    options, prompt = {**OPTIONS, "cache_dir": tmp_path / "cache"}, prompt_of(5 * CHUNK + 3)
    with Runtime.load(targets["llama"], **options) as runtime:
        name = runtime.submit(prompt, SamplingParams(max_tokens=8))
        runtime.step()
        for key, buffer in runtime.executor.state.items():
            if key.startswith("k_cache"):
                buffer[runtime.scheduler.kvcache.commands(name)["prefill_table"][1]] = float("nan")
        outputs = [output for _ in range(9) if runtime.busy for output in runtime.step()]
        assert outputs[-1].error_code == "not_finite"
    assert files_of(tmp_path) == []


def test_a_directory_that_lets_others_in_is_refused(targets: dict[str, Path], tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"lets others in \(mode 755\).*chmod 700"):
        Runtime.load(targets["llama"], cache_dir=tmp_path, **OPTIONS)
    with pytest.raises(ConfigError, match="prefix_reuse"):
        Runtime.load(targets["llama"], host_cache_gib=1.0, prefix_reuse=False, **OPTIONS)


def test_what_a_full_disk_did_not_take_is_written_when_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again at growing intervals, one content at a time, and all at once when one was written."""
    writing, attempts = "lowlat.sequence.tiers.disk.written_whole", list[Path]()
    monkeypatch.setattr("lowlat.sequence.tiers.unwritten.RETRY_S", 0.05)

    def full(path: Path, prefix: str) -> Any:
        attempts.append(path)
        raise OSError(errno.ENOSPC, "No space left on device")

    def put(*numbers: int) -> None:
        for number in numbers:
            tiers.put(key(number), partial(torch.full, (10,), number, dtype=torch.uint8))
        tiers.flush()

    tier = DiskTier(tmp_path / "cache", 1 << 20, "f" * 16)
    tiers = CacheTiers(host_tier(1 << 20), tier, Pages())
    monkeypatch.setattr(writing, full)
    begun = time.monotonic()
    put(*range(4))
    tiers.drop(key(3))
    while len(attempts) < 4 + 3:
        assert time.monotonic() < begun + 20.0
        time.sleep(0.01)
    assert 0.05 * (2 ** (len(attempts) - 4) - 1) <= time.monotonic() - begun  # after 0.05 s, 0.1 s, 0.2 s
    assert files_of(tmp_path) == []
    monkeypatch.setattr(writing, written_whole)
    put(4)  # shows that there is room
    deadline = time.monotonic() + 20.0
    while len(files_of(tmp_path)) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    tiers.flush()
    assert all(tiers.has(key(number)) for number in (0, 1, 2, 4)) and key(3) not in tier
    tiers.close()
    found = tier.read(key(2), memory)
    assert found is not None and found.tolist() == [2] * 10 and len(files_of(tmp_path)) == 4


@pytest.mark.parametrize("has_room", [False, True])
def test_what_could_not_be_written_is_tried_once_more_at_the_end(
    has_room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path / "cache", 1 << 20, "f" * 16)
    tiers, writes = CacheTiers(host_tier(1 << 20), tier, Pages()), list[ChunkKey]()

    def write(name: ChunkKey, content: torch.Tensor) -> bool:
        writes.append(name)
        return len(writes) > 3 and has_room

    monkeypatch.setattr(tier, "write", write)
    for number in range(3):
        tiers.put(key(number), lambda: torch.zeros(10, dtype=torch.uint8))
    tiers.close()
    assert writes[3:] == ([key(0), key(1), key(2)] if has_room else [key(0)])


@pytest.mark.parametrize("in_files", [False, True])
def test_a_tier_lets_the_end_of_a_chain_go_before_its_beginning(in_files: bool, tmp_path: Path) -> None:
    pages = Pages()
    disk = DiskTier(tmp_path / "cache", 24 * 190, "f" * 16) if in_files else None
    tiers = CacheTiers(host_tier((16 if in_files else 24) * ALIGNMENT), disk, pages)
    cache = KVCache(14 * 2, 8, CHUNK, reuse=True, share_decoded=False, tiers=tiers)  # the device keeps the last prompt
    for number, count in enumerate((12, 12, 6)):
        assert read_prompt(cache, tiers, str(number), [number] * (count * CHUNK)) == 0
    assert read_prompt(cache, tiers, "again", [0] * (12 * CHUNK + 1)) == 6 * CHUNK
    tiers.close()


@pytest.mark.parametrize("in_files", [False, True])
def test_tiers_keep_of_windows_what_prompts_go_on_from(
    in_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_book, "KEPT_EVERY", 16 * CHUNK)
    pages, prompt = Pages(300), [value for value in range(50) for _ in range(CHUNK)]
    size = 40 if in_files else 400
    disk = DiskTier(tmp_path / "cache", 1 << 20, "f" * 16) if in_files else None
    tiers, seen = CacheTiers(host_tier(size * ALIGNMENT), disk, pages), 10  # chunks that rows see at most
    book = WindowBook(WindowPool(32, 201, 8, num_at_once=4 * CHUNK, num_behind=0, num_ahead=1), CHUNK)
    cache = KVCache(250, 8, CHUNK, reuse=True, share_decoded=False, tiers=tiers, books=[book])
    assert read_prompt(cache, tiers, "a", prompt) == 0
    # after 16, 32 and 48 chunks, which is near its end; all where memory is free
    assert 50 + 4 <= tiers.counts.saved <= 50 + (3 * seen if in_files else 50)
    cache.forget_all()
    assert read_prompt(cache, tiers, "again", [*prompt, 0]) == 50 * CHUNK
    assert tiers.counts.read <= in_files * (50 + seen)  # what it goes on from, and nothing before
    cases = [(40, 32), (40, 40), (22, 16), (22, 22)]  # from the second prompt that parts there on
    if not in_files:
        cases = [(40, 40), (22, 22)]
    for number, (count, found) in enumerate(cases):
        cache.forget_all()
        other = [*prompt[: count * CHUNK], *[100 + number] * (3 * CHUNK + 2)]
        assert read_prompt(cache, tiers, f"b{number}", other) == found * CHUNK
    tiers.close()


@pytest.mark.parametrize("num_contents", [8, 12, 16])
def test_a_prompt_comes_from_files_through_host_memory_that_is_smaller(num_contents: int, tmp_path: Path) -> None:
    """Reads ahead take half of it; the others wait until copies to the device have given theirs back."""
    prompt = [*(value for value in range(30) for _ in range(CHUNK)), 0]
    for size, found in ((64, 0), (num_contents, 30), (num_contents, 30)):
        disk = DiskTier(tmp_path / "cache", 1 << 20, "f" * 16)
        tiers = CacheTiers(host_tier(size * ALIGNMENT), disk, Pages())
        cache = KVCache(100, 8, CHUNK, reuse=True, share_decoded=False, tiers=tiers)
        assert read_prompt(cache, tiers, "a", prompt) == found * CHUNK
        assert tiers.counts.misses == 0 and tiers.counts.saved == (0 if found else 30)
        tiers.close()


@pytest.mark.parametrize(("num_contents", "found"), [(8, 0), (12, 50), (16, 50)])
def test_a_window_comes_from_files_if_host_memory_holds_what_rows_see_of_it(
    num_contents: int, found: int, tmp_path: Path
) -> None:
    """Ten chunks, which are read at a time, and none goes for another; where they do not fit, it is a miss in the
    end."""
    prompt = [value for value in range(50) for _ in range(CHUNK)]
    for size, hits in ((400, 0), (num_contents, found)):
        disk = DiskTier(tmp_path / "cache", 1 << 20, "f" * 16)
        tiers = CacheTiers(host_tier(size * ALIGNMENT), disk, Pages(300))
        book = WindowBook(WindowPool(130, 201, 8, num_at_once=4 * CHUNK, num_behind=0, num_ahead=1), CHUNK)
        cache = KVCache(250, 8, CHUNK, reuse=True, share_decoded=False, tiers=tiers, books=[book])
        assert read_prompt(cache, tiers, "a", [*prompt, 0]) == hits * CHUNK
        assert not cache._moves._found
        tiers.close()


def test_contents_that_were_read_for_nobody_leave_memory_to_others(tmp_path: Path) -> None:
    """Requests that were cancelled had asked for as many as host memory holds."""
    disk = DiskTier(tmp_path / "cache", 1 << 20, "f" * 16)
    for number in range(20):
        disk.write(key(number), torch.full((10,), number, dtype=torch.uint8))
    tiers = CacheTiers(host_tier(8 * ALIGNMENT), disk, Pages())
    for number in range(8):
        assert tiers.find(key(number)) is COMING
    tiers.flush()
    assert len(tiers._fresh) == 8
    tiers.put(KEY, lambda: torch.ones(10, dtype=torch.uint8))
    tiers.flush()
    assert KEY in disk and isinstance(tiers.find(KEY), torch.Tensor)
    for number in range(8, 20):
        found = tiers.find(key(number))
        if found is COMING:
            tiers.read_ahead(map(key, range(number + 1, 20)))
            tiers.flush()
            found = tiers.find(key(number))
        assert isinstance(found, torch.Tensor) and found.tolist() == [number] * 10
        assert not tiers._fresh.keys() & {*map(key, range(8))}
        del found
    assert tiers.counts.misses == 0
    tiers.close()


def read_prompt(cache: KVCache, tiers: CacheTiers, name: str, prompt: list[int]) -> int:
    """Admit a prompt, prefill and release it; returns the positions that were found."""
    pages = Pages(300)
    deadline = time.monotonic() + 20.0
    while (allocation := cache.admit(name, prompt, len(prompt) + 1, 1)) is None:
        assert time.monotonic() < deadline
        tiers.copy_in([load for load in cache.take_loads() if load.holder is not None], pages.mark())
        tiers.flush()
    cache.take_loads()
    for start in range(allocation.num_cached_tokens, len(prompt), CHUNK):
        stop = min(start + CHUNK, len(prompt))
        cache.append(name, start, stop)
        cache.mark_prefilled(name, stop)
        for save in cache.take_saves():
            if save.holder is None:
                tiers.put(save.key, lambda: torch.zeros(2, dtype=torch.uint8))
            else:
                tiers.copy_out([save], pages.mark())
        tiers.flush()
    cache.release(name)
    tiers.flush()
    cache.invariants()
    return allocation.num_cached_tokens


def test_a_content_that_is_dropped_while_it_is_saved_is_found_by_nobody(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path / "cache", 1 << 20, "f" * 16)
    tiers = CacheTiers(host_tier(1 << 20), disk, Pages())
    tiers.put(KEY, lambda: torch.zeros(10, dtype=torch.uint8))
    tiers.drop(KEY)
    assert tiers.find(KEY) is None
    tiers.flush()
    assert tiers.find(KEY) is None and files_of(tmp_path) == []
    tiers.put(KEY, lambda: torch.ones(10, dtype=torch.uint8))
    tiers.close()
    again = CacheTiers(host_tier(1 << 20), disk, Pages())
    assert again.find(KEY) is COMING
    again.flush()
    found = again.find(KEY)
    assert isinstance(found, torch.Tensor) and found.tolist() == [1] * 10 and again.num_read == 1
    again.close()


class Gate:
    """Has calls of a function wait until it is opened."""

    def __init__(self, function: Callable[..., Any], *, after: bool = False) -> None:
        self.entered, self.opened, self.calls = threading.Event(), threading.Event(), list[object]()
        self._function, self._after = function, after

    def __call__(self, name: object, *arguments: Any) -> Any:
        self.calls.append(name)
        made = self._function(name, *arguments) if self._after else None
        self.entered.set()
        assert self.opened.wait(20.0)
        return made if self._after else self._function(name, *arguments)


def test_a_content_that_is_dropped_while_its_file_is_read_is_found_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drop is done before the read is: what was read is no content, nor does it take the place of a later one."""
    disk = DiskTier(tmp_path / "cache", 1 << 20, "f" * 16)
    disk.write(KEY, torch.zeros(10, dtype=torch.uint8))
    gate = Gate(disk.read, after=True)
    monkeypatch.setattr(disk, "read", gate)
    tiers = CacheTiers(host_tier(1 << 20), disk, Pages())
    assert tiers.find(KEY) is COMING and gate.entered.wait(20.0)
    tiers.drop(KEY)
    deadline = time.monotonic() + 20.0
    while KEY in tiers._dropping:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    gate.opened.set()
    tiers.flush()
    assert tiers.find(KEY) is None and not tiers.has(KEY)
    tiers.put(KEY, lambda: torch.ones(10, dtype=torch.uint8))
    tiers.flush()
    found = tiers.find(KEY)
    assert isinstance(found, torch.Tensor) and found.tolist() == [1] * 10 and tiers.has(KEY)
    tiers.close()


def test_a_content_that_is_dropped_before_its_file_is_written_is_never_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process could read it there until it is taken out."""
    disk = DiskTier(tmp_path / "cache", 1 << 20, "f" * 16)
    gate = Gate(disk.write)
    monkeypatch.setattr(disk, "write", gate)
    tiers = CacheTiers(host_tier(1 << 20), disk, Pages())
    for name in (key(1), KEY):
        tiers.put(name, lambda: torch.zeros(10, dtype=torch.uint8))
    assert gate.entered.wait(20.0)
    tiers.drop(KEY)
    tiers.put(KEY, lambda: torch.ones(10, dtype=torch.uint8))
    gate.opened.set()
    tiers.close()
    assert gate.calls == [key(1), KEY]
    found = disk.read(KEY, memory)
    assert found is not None and found.tolist() == [1] * 10


def test_a_content_that_is_dropped_twice_is_found_by_nobody_after_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, content = DiskTier(tmp_path / "cache", 1 << 20, "f" * 16), threading.Event()
    tiers = CacheTiers(host_tier(1 << 20), disk, Pages())

    def wrong() -> torch.Tensor:
        assert content.wait(20.0)
        return torch.zeros(10, dtype=torch.uint8)

    second, dropping = Gate(disk.drop), threading.Event()

    def drop(name: ChunkKey) -> None:
        if dropping.is_set():
            second(name)
        dropping.set()

    monkeypatch.setattr(disk, "drop", drop)
    tiers.drop(KEY)
    tiers.put(KEY, wrong)
    tiers.drop(KEY)
    assert dropping.wait(20.0)
    content.set()
    assert second.entered.wait(20.0)
    assert tiers.find(KEY) is None and KEY not in disk
    second.opened.set()
    tiers.close()
    assert tiers.find(KEY) is None


@pytest.mark.parametrize("is_written_first", [True, False])
def test_a_content_that_was_written_while_its_file_was_missed_is_found_again(
    is_written_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadline = time.monotonic() + 20.0
    disk = DiskTier(tmp_path / "cache", 1 << 20, "f" * 16)
    disk.write(KEY, torch.zeros(10, dtype=torch.uint8))
    gate = Gate(disk.read, after=True)
    monkeypatch.setattr(disk, "read", gate)
    tiers = CacheTiers(host_tier(8 * ALIGNMENT), disk, Pages())
    disk.drop(KEY)  # as another process does that needs space
    monkeypatch.setattr(DiskTier, "__contains__", lambda *_: True)  # it was there a moment ago
    assert tiers.find(KEY) is COMING and gate.entered.wait(20.0)
    monkeypatch.undo()
    if is_written_first:
        tiers.put(KEY, lambda: torch.ones(10, dtype=torch.uint8))
        while not disk.is_whole(KEY):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        gate.opened.set()
    else:
        writing = Gate(disk.write)
        monkeypatch.setattr(disk, "write", writing)
        tiers.put(KEY, lambda: torch.ones(10, dtype=torch.uint8))
        assert writing.entered.wait(20.0)
        gate.opened.set()
        while KEY in tiers._coming:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        writing.opened.set()
    tiers.flush()
    for number in range(8):  # take its place in host memory
        tiers.put(key(number), lambda: torch.zeros(10, dtype=torch.uint8))
    tiers.flush()
    assert tiers.find(KEY) is COMING
    tiers.flush()
    found = tiers.find(KEY)
    assert isinstance(found, torch.Tensor) and found.tolist() == [1] * 10
    tiers.close()


@pytest.mark.parametrize("problem", ["a fault of the disk", "no host memory"])
def test_a_content_whose_file_could_not_be_read_once_is_kept_again(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a miss, so that prefill reads it; what prefill then saves is found, though there was a file all along."""
    disk = DiskTier(tmp_path / "cache", 1 << 20, "f" * 16)
    tiers, pages = CacheTiers(host_tier(8 * ALIGNMENT), disk, Pages()), Pages()
    others = [key(number) for number in range(8)]
    for name in (KEY, *others):  # the others take its place in host memory
        tiers.put(name, lambda: torch.ones(10, dtype=torch.uint8))
        tiers.flush()
    assert tiers.has(KEY)
    with monkeypatch.context() as patch:
        held = []
        if problem == "no host memory":
            held = [tiers.find(name) for name in others]  # as copies to the device do

        def fails(*_: object) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

        if not held:
            patch.setattr(os, "pread", fails)
        assert tiers.find(KEY) is COMING
        tiers.flush()
        held.clear()
    assert tiers.find(KEY) is None and not tiers.has(KEY) and KEY in disk
    tiers.copy_out([Save(KEY, tuple(range(10)), 1)], pages.mark())
    tiers.flush()
    assert tiers.has(KEY) and isinstance(tiers.find(KEY), torch.Tensor)
    tiers.close()


@pytest.mark.parametrize("asked", ["find", "has", "read_ahead"])
def test_a_slow_file_system_holds_up_none_but_who_asks_it(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of other requests start and end, files are read, and figures are told meanwhile."""
    disk = DiskTier(tmp_path / "cache", 1 << 20, "f" * 16)
    disk.write(key(1), torch.ones(10, dtype=torch.uint8))
    tiers, pages, answers, done = CacheTiers(host_tier(1 << 20), disk, Pages()), Pages(), list[object](), list[object]()
    reading = Gate(disk.read)
    monkeypatch.setattr(disk, "read", reading)
    assert tiers.find(key(1)) is COMING and reading.entered.wait(20.0)
    disk.write(KEY, torch.ones(10, dtype=torch.uint8))
    slow = Gate(os.path.exists)
    monkeypatch.setattr(os.path, "exists", slow)
    asking = threading.Thread(
        target=lambda: answers.append(getattr(tiers, asked)([KEY] if asked == "read_ahead" else KEY)), daemon=True
    )
    asking.start()
    assert slow.entered.wait(20.0)

    def others() -> None:
        reading.opened.set()
        tiers.copy_out([Save(key(2), tuple(range(10)), 2)], pages.mark())
        while not done or key(1) in tiers._coming:
            done.extend(tiers.take_done())
            time.sleep(0.001)
        done.append(tiers.stats()["read"])

    working = threading.Thread(target=others, daemon=True)
    working.start()
    working.join(10.0)
    held_up = working.is_alive()
    slow.opened.set()
    asking.join(20.0)
    working.join(20.0)
    assert not held_up and done == [2, 1]
    assert answers == [{"find": COMING, "has": True, "read_ahead": None}[asked]]
    tiers.flush()
    assert tiers.counts.read == (1 if asked == "has" else 2)
    tiers.close()


def test_copies_name_their_holders_when_they_have_ended_and_keep_to_their_rate() -> None:
    pages = Pages()
    tiers = CacheTiers(host_tier(1 << 20), None, pages, max_bytes_per_s=1000.0)
    pages.blocks[:40] = torch.arange(40)
    begun = time.monotonic()
    tiers.copy_out([Save(key(n), tuple(range(10 * n, 10 * n + 10)), n) for n in range(4)], pages.mark())
    tiers.flush()
    assert time.monotonic() - begun >= 0.03 and sorted(map(int, map(str, tiers.take_done()))) == [0, 1, 2, 3]
    loads = []
    for number in range(4):
        content = tiers.find(key(number))
        assert isinstance(content, torch.Tensor)
        loads.append(Load("", tuple(range(50 + 10 * number, 60 + 10 * number)), content, number))
    tiers.copy_in(loads, pages.mark())
    tiers.flush()
    assert pages.blocks[50:90].tolist() == list(range(40)) and len(tiers.take_done()) == 4
    stats = tiers.stats()
    assert stats["bytes_in"] == stats["bytes_out"] == 40 and stats["copies_under_way"] == 0
    tiers.close()


@pytest.mark.parametrize(
    "error", [OSError(5, "a disk's fault"), MemoryError("no memory"), ValueError("a bug")], ids=repr
)
@pytest.mark.parametrize("place", ["start_in", "wait in", "start_out", "wait out", "content_bytes", "reserve", "put",
                                   "read", "write", "drop"])  # fmt: skip
def test_no_error_ends_a_thread_of_the_tiers_or_leaves_anybody_waiting(
    place: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named, its content is a miss, whoever holds blocks for it gets them back, and the next order is done."""
    pages, disk = Pages(), DiskTier(tmp_path / "cache", 1 << 20, "f" * 16)
    tiers = CacheTiers(host_tier(1 << 20), disk, pages)
    pages.blocks[:10] = 3
    save, stays = Save(key(1), tuple(range(10)), 1), Save(key(2), tuple(range(10)), 2)
    tiers.copy_out([stays], pages.mark())
    tiers.flush()
    content = tiers.find(key(2))
    assert isinstance(content, torch.Tensor) and list(map(str, tiers.take_done())) == ["2"]
    load = Load("", tuple(range(20, 30)), content, 3)

    def fails(*_: object, **__: object) -> Any:
        raise error

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        if place in ("start_in", "start_out", "content_bytes"):
            patch.setattr(pages, place, fails)
        elif place in ("wait in", "wait out"):
            patch.setattr(pages, place.replace("wait ", "start_"), lambda *_: fails)
        elif place == "reserve":
            patch.setattr(tiers._host, place, fails)
        elif place != "put":
            patch.setattr(disk, place, fails)
        if place in ("start_in", "wait in"):
            tiers.copy_in([load], pages.mark())
        elif place == "read":
            disk.write(key(1), content)
            assert tiers.find(key(1)) is COMING
        elif place == "drop":
            tiers.drop(key(2))
        elif place == "put":
            tiers.put(key(1), fails)
        else:
            tiers.copy_out([save], pages.mark())
        waiting = threading.Thread(target=tiers.flush, daemon=True)
        waiting.start()
        waiting.join(20.0)
        assert not waiting.is_alive(), "an order was never ended"
        deadline = time.monotonic() + 20.0
        while error.args[-1] not in caplog.text:  # it is named when its order has ended
            assert time.monotonic() < deadline
            time.sleep(0.001)
    assert all(thread.is_alive() for thread in tiers._threads)
    held = {"start_in": 3, "wait in": 3}.get(place, None if place in ("read", "drop", "put") else 1)
    assert tiers.take_done() == ([] if held is None else [held])
    assert tiers.take_failed() == ([3] if held == 3 else [])
    if place != "write":  # the content itself came
        assert not isinstance(tiers.find(key(1)), torch.Tensor)
    tiers.copy_out([Save(key(4), tuple(range(10)), 4)], pages.mark())
    tiers.copy_in([load], pages.mark())
    tiers.flush()
    assert sorted(map(str, tiers.take_done())) == ["3", "4"] and pages.blocks[20:30].tolist() == [3] * 10
    tiers.close()
    assert not any(thread.is_alive() for thread in tiers._threads)
