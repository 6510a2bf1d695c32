"""A runtime of two ranks, on one GPU and on two: control state that stays the same, launches fused or not, loops,
requests with a grammar, a lost rank; and one rank next to two where sums do not depend on how many there are.
"""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from needed_gpus import need_gpus
from tiny_grammars import Automaton, Slow, accepts, random_edges, submit_with
from tiny_models import make_target, mxfp4_target

import lowlat
from lowlat.engine.loading import loading
from lowlat.errors import DeviceError
from lowlat.executors.distributed.parallel import ParallelExecutor

pytestmark = pytest.mark.timeout(240)
TARGET, HEAD = "lowlat/demo/target", "lowlat/demo/head"
SAME = ("tokens", "lengths", "active", "drafts", "num_drafts", "block_table", "output_counts")
PROMPTS = ("The President shall", "Congress shall make no law", "No person shall")
CHOSEN = {"adaptive_width": True}
SHAPES: dict[str, Any] = {"max_batch": 2, "max_context": 256, "device": "cuda", "executor": "graph"}
WIDE, NARROW = random_edges(3, 4096, num_states=5, most=900, forced=0.0), random_edges(1, 4096)


@pytest.fixture(autouse=True)
def placed_ranks(monkeypatch: pytest.MonkeyPatch, rank_gpus: list[torch.device]) -> None:
    """Ranks that share a GPU have streams of their own."""
    if rank_gpus[0] == rank_gpus[1]:
        monkeypatch.setattr(loading, "rank_devices", lambda choice, size, named=(): rank_gpus[:size])


def load(**options: Any) -> lowlat.Runtime:
    """A runtime of the bundled pair."""
    chosen = {name: options.pop(name) for name in CHOSEN if name in options}
    draft = lowlat.SpeculativeConfig(model=HEAD, num_speculative_tokens=3, **chosen)
    return lowlat.Runtime.load(TARGET, draft, **{**SHAPES, **options})


def run(runtime: lowlat.Runtime, names: list[str]) -> list[list[int]]:
    """The tokens of requests, which all ranks have come to."""
    found: dict[str, list[int]] = {name: [] for name in names}
    while runtime.busy:
        for output in runtime.step():
            found[output.request_id] += output.token_ids
    executor: Any = runtime.executor
    executor.synchronize()
    for rank in getattr(executor, "ranks", []):
        for name in SAME:
            first = 1 if name == "drafts" else 0  # a chain's root is no draft: nothing is written in its place
            assert torch.equal(rank.state[name][..., first:].cpu(), executor.state[name][..., first:].cpu()), name
    return list(found.values())


def sampling_of(number: int) -> lowlat.SamplingParams:
    """Greedy, and warmer with each."""
    return lowlat.SamplingParams(max_tokens=40, temperature=0.5 * number, seed=number, ignore_eos=True)


def decode(**options: Any) -> list[list[int]]:
    """The tokens of three requests, of which the last one waits for a slot."""
    with load(**options) as runtime:
        return run(runtime, [runtime.submit(prompt, sampling_of(number)) for number, prompt in enumerate(PROMPTS)])


def decode_guided(automaton: type[Automaton] = Automaton, depth: int = 3, **options: Any) -> list[list[int]]:
    """The tokens of a plain request, of one next to it with a grammar of many choices, and of one of few that waits.

    Before them one is given up.
    """
    with load(**options) as runtime:
        runtime.speculate(depth)
        tokenizer = runtime.codec
        assert tokenizer is not None
        plain, wide, narrow = (tokenizer.encode(prompt) for prompt in PROMPTS)
        cancelled = submit_with(runtime, automaton(NARROW), narrow, sampling_of(0))
        for _ in range(5):
            runtime.step()
        runtime.cancel(cancelled)
        names = [runtime.submit(plain, sampling_of(0)), submit_with(runtime, automaton(WIDE), wide, sampling_of(1))]
        names.append(submit_with(runtime, automaton(NARROW), narrow, sampling_of(0)))
        found = run(runtime, [*names, cancelled])[:3]
        assert accepts(WIDE, found[1]) and accepts(NARROW, found[2])
        assert runtime.summary()["structured_output"]["num_requests"] == 3
        return found


@pytest.mark.parametrize("rank_gpus", ["two GPUs"], indirect=True)
def test_ranks_keep_prefixes_and_sessions_and_sleep_together(tmp_path: Path) -> None:
    """In host memory, in files and in a session's file, with weights that leave the devices and come back.

    Two ranks' prompts of many chunks do not always run at once on one GPU, so it takes two.
    """
    long = PROMPTS[0] * 40
    two: dict[str, Any] = {"tensor_parallel_size": 2, "max_context": 512, "max_batch": 1, "prefill_chunk": 64}

    def answer(runtime: lowlat.Runtime, **options: Any) -> list[list[int]]:
        return run(runtime, [runtime.submit(long, sampling_of(1), **options)])

    with load(prefix_reuse=False, **two) as runtime:
        expected = answer(runtime)
    with load(cache_dir=tmp_path / "cache", host_cache_gib=0.5, can_sleep=True, **two) as runtime:
        assert answer(runtime, session="kept") == expected
        runtime.session("kept").save(tmp_path / "kept")
        free = torch.cuda.mem_get_info()[0]
        for _ in range(2):
            runtime.sleep()
            assert torch.cuda.mem_get_info()[0] > free
            runtime.wake()
            before = runtime.kvcache.stats().hit_tokens
            assert answer(runtime) == expected and runtime.kvcache.stats().hit_tokens - before >= 64
        assert runtime.summary()["kv"]["tiers"]["bytes_in"] > 0
    with load(cache_dir=tmp_path / "cache", **two) as runtime:
        assert answer(runtime) == expected and runtime.kvcache.stats().hit_tokens >= 64
    with load(**two) as runtime:
        session = runtime.load_session(tmp_path / "kept")
        assert answer(runtime, session=session) == expected and runtime.kvcache.stats().hit_tokens >= 64


def test_ranks_agree_fused_or_not_in_steps_and_in_loops() -> None:
    two = decode(tensor_parallel_size=2)
    assert [len(tokens) for tokens in two] == [40] * 3
    assert decode(tensor_parallel_size=2, device_loop=True) == two
    assert decode(tensor_parallel_size=2, fuse=False) == two
    assert decode(tensor_parallel_size=2, adaptive_width=True) == two
    assert decode(tensor_parallel_size=2, **CHOSEN) == two
    assert decode()[0][:8] == two[0][:8]  # sums of another order: equal until two tokens are nearly alike


def test_one_gpu_and_two_have_the_same_tokens_where_sums_are_invariant() -> None:
    """Of the dense pair, drafts cut too: fused and not, in steps, in loops and where the device chooses widths."""
    one = decode(tp_invariant=True)
    assert [len(tokens) for tokens in one] == [40] * 3
    for size in (1, 2):
        given = {"tensor_parallel_size": size, "tp_invariant": True}
        for options in ({}, {"fuse": False}, {"device_loop": True}, CHOSEN):
            assert decode(**given, **options) == one, (size, options)
    assert decode(tp_invariant=True, executor="eager") == one
    assert decode()[0][:8] == one[0][:8]  # sums of another order: equal until two tokens are nearly alike


@pytest.mark.parametrize("rank_gpus", ["two GPUs"], indirect=True)
def test_four_gpus_have_the_tokens_of_one() -> None:
    """As sums are invariant; the pair's only KV head is on every GPU."""
    need_gpus(4)
    one = decode(tp_invariant=True)
    for options in ({}, {"device_loop": True}, CHOSEN):
        assert decode(tensor_parallel_size=4, tp_invariant=True, **options) == one, options
    assert decode(tensor_parallel_size=4)[0][:8] == one[0][:8]  # sums of another order


@pytest.mark.parametrize("name", ["llama_fp8", "llama_int4", "qwen3_moe", "mxfp4"])
def test_any_number_of_ranks_has_the_same_tokens_where_sums_are_invariant(
    name: str, tmp_path: Path, rank_gpus: list[torch.device]
) -> None:
    """Weights of 8 and 4 bits, and MoE layers; parts are of several sizes, and each rank has its own.

    Where both share a GPU, a prompt is one chunk: rows that wait for the other rank have a block each, and blocks on
    all SMs would leave it none with the shared memory of a prefill GEMM.
    """
    sizes: dict[str, Any] = {
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "hidden_size": 256, "num_hidden_layers": 2,
        "intermediate_size": 1152, "vocab_size": 512,
    }  # fmt: skip
    if name == "mxfp4":
        mxfp4_target(tmp_path, gain=0.45, **sizes)
    else:
        make_target(tmp_path, name.partition("_")[0] if name != "qwen3_moe" else name, gain=0.45, **sizes)
    quantise = {"quantize": name.removeprefix("llama_")} if name.startswith("llama_") else {}
    shape: dict[str, Any] = {"max_batch": 2, "max_context": 256, "device": "cuda", "executor": "graph"}
    length = 100 if rank_gpus[0] == rank_gpus[1] else 150
    prompt, found = [int(token) for token in torch.randint(1, 500, (length,))], []
    for size, options in ((1, {}), (1, {"fuse": False}), (2, {}), (2, {"fuse": False})):
        given = {"dtype": "bfloat16", "tensor_parallel_size": size, "tp_invariant": True, **quantise, **options}
        with lowlat.Runtime.load(tmp_path, **{**shape, **given}) as runtime:
            found.append(run(runtime, [runtime.submit(prompt[number:], sampling_of(number)) for number in range(2)]))
    assert all(tokens == found[0] for tokens in found[1:]) and [len(each) for each in found[0]] == [40, 40]


def test_ranks_draw_under_the_same_masks() -> None:
    """With drafts and without, and where the host is slower than all GPUs."""
    two = decode_guided(tensor_parallel_size=2)
    assert [len(tokens) for tokens in two] == [40] * 3
    assert decode_guided(depth=0, tensor_parallel_size=2) == two
    assert decode_guided(Slow, tensor_parallel_size=2, device_loop=True) == two
    assert decode_guided(tensor_parallel_size=2, fuse=False) == two
    one = decode_guided()
    assert [one[place][:8] for place in (0, 2)] == [two[place][:8] for place in (0, 2)]


def test_a_rank_that_never_comes_is_an_error_within_a_second() -> None:
    with load(tensor_parallel_size=2, watchdog_min_s=0.2) as runtime:
        runtime.submit(PROMPTS[0], lowlat.SamplingParams(max_tokens=200, ignore_eos=True))
        for _ in range(24):
            runtime.step()
        executor = runtime.executor
        assert isinstance(executor, ParallelExecutor)
        executor.synchronize()
        lone = executor.ranks.pop()
        start = time.monotonic()
        with pytest.raises(DeviceError, match=r"hangs: step|waited in vain"):
            while runtime.busy:
                runtime.step()
        assert time.monotonic() - start < 2.0
        executor.ranks.append(lone)
