"""SpecPV on a GPU: its kernels against the reference, and whole runs in every executor."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import chain, check, tree
from lockstep import Lockstep
from partial_cases import PartialCase
from prefill_slots import Shape, Slot, close
from recording import prompt_of, run_all
from tiny_models import PairPaths, make_pair

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.executors.eager import EagerExecutor
from lowlat.executors.launcher import Launcher
from lowlat.kernels import reference
from lowlat.kernels.attention.attention import attention, partial_attention
from lowlat.kernels.attention.partial.block_lists import choose_blocks, list_lens
from lowlat.kernels.attention.partial.block_summary import summarise_blocks
from lowlat.lowering.prefill_attention import refresh_attention
from lowlat.models.target import load_target
from lowlat.speculators.methods import load_speculator

DEFAULTS = {"num_sinks": 2, "num_retrieved": 256}
OPTIONS: dict[str, Any] = {"max_batch": 4, "max_context": 288, "block_size": 32, "prefill_chunk": 32, "device": "cuda"}
SPECPV: dict[str, Any] = {
    "enable_specpv": True,
    "specpv_n_sink_blocks": 1,
    "specpv_n_retrieval_blocks": 2,
    "specpv_n_window_blocks": 1,
    "specpv_n_spec_tokens_buf": 40,
    "specpv_partial_threshold": 0,
    "specpv_full_refresh_steps": 9,
}


class Bench:
    """Launches with one workspace for all calls; floats in it start as NaN."""

    def __init__(self) -> None:
        self.launcher = Launcher(torch.device("cuda", 0))
        self.memory: dict[tuple[str, tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def workspace(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        key = name, shape, dtype
        if key not in self.memory:
            self.memory[key] = torch.full(shape, math.nan if dtype.is_floating_point else 0, dtype=dtype, device="cuda")
        return self.memory[key]


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize(
    ("length", "options"),
    [
        (415, {}),
        (270, {"dim": 128, "heads": 8, "size": 64}),
        (60, {}),
        (9001, {"dim": 128, "heads": 32, "kv_heads": 8, "sizes": DEFAULTS, "window": 8}),
        (40007, {"heads": 16, "sizes": DEFAULTS, "window": 8}),
    ],
)
def test_summaries_and_lists_are_the_reference_s(bench: Bench, length: int, options: dict[str, Any]) -> None:
    """Lists may differ where two scores are equal but for their rounding: then the blocks' scores say so."""
    found, expected = (PartialCase(length, device=device, **options) for device in ("cuda", "cpu"))
    bench.launcher.run(*summarise_blocks(**found.span()))
    reference.partial.summarise_blocks(**expected.span())
    assert torch.equal(found.summary.cpu(), expected.summary)
    bench.launcher.run(*choose_blocks(**found.choice(), workspace=bench.workspace))
    reference.partial.choose_blocks(**expected.choice())
    lists = found.lists.cpu()
    assert (lists[0] == -1).all()
    window = found.sizes["num_sinks"] + found.sizes["num_retrieved"]
    assert torch.equal(lists[1, :, window:], expected.lists[1, :, window:])
    for head in range(lists.shape[1]):
        chosen, wanted = (set(each[1, head, :window].tolist()) for each in (lists, expected.lists))
        assert len(chosen) == window and len(chosen & wanted) >= window - 1 - window // 64


@pytest.mark.parametrize("masks", [chain(1), chain(4), tree(16, 3)], ids=["one", "chain", "tree"])
@pytest.mark.parametrize("options", [{}, {"dim": 128, "heads": 32, "kv_heads": 8, "sizes": DEFAULTS, "window": 8}])
def test_attention_over_lists(bench: Bench, masks: list[int], options: dict[str, Any]) -> None:
    """It is the reference's; and over lists of everything `attention`, to the bit, in splits of both sizes."""
    for length in (300, 5000):
        case = PartialCase(length, device="cuda", **options)
        case.choose()
        found, expected = case.attended(masks), case.attended(masks)
        bench.launcher.run(*partial_attention(**found, workspace=bench.workspace))
        reference.partial.partial_attention(**expected)
        check(found["out"], expected["out"])
    case.left_out, case.shifts[1] = 0, 0
    case.choose()
    for split in (256, 512):
        found, given = case.attended(masks), case.attended(masks)
        bench.launcher.run(*partial_attention(**found, workspace=bench.workspace, split=split))
        del given["block"], given["block_lists"]
        table = case.table.expand(2, -1).contiguous()
        bench.launcher.run(*attention(**given, block_table=table, workspace=bench.workspace, split=split))
        assert torch.equal(found["out"].view(torch.int16), given["out"].view(torch.int16))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("start", [0, 4095, 4096, 30_011])
def test_a_refresh_attends_to_all_before_it(bench: Bench, start: int, sinks: bool) -> None:
    """Torch's flash attention over parts, of which some are whole, one begun and the rest empty."""
    shape = Shape(128, 32, 8, 128, 32, 32_768)
    scores = torch.linspace(-3, 3, 32, device="cuda") if sinks else None
    for count in (128, 3):
        slot = Slot(start, count, shape=shape, device="cuda")
        found = slot.flash(bench.launcher, scores, lower=refresh_attention)
        assert close(found[: slot.count], slot.expected(scores), 8e-3) and bool(found.isfinite().all())


def test_lens(bench: Bench) -> None:
    lens, slots, shifts = (torch.tensor(v, dtype=torch.int32).cuda() for v in ([100, 50, 9], [2, 0, -1], [0, 7, 32]))
    out = torch.empty_like(lens)
    bench.launcher.run(*list_lens(lens, slots, shifts, out=out))
    assert out.tolist() == [68, 50, 9]


@pytest.fixture(scope="module", params=["llama", "gpt_oss"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64}
    return make_pair(tmp_path_factory.mktemp(request.param), request.param, **sizes)


def load(pair: PairPaths, executor: str, *, partial: bool = True, lossless: bool = False, **options: Any) -> Runtime:
    own = {**SPECPV, "specpv_lossless": True, "specpv_n_spec_tokens_buf": 31} if lossless else SPECPV
    config = SpeculativeConfig(model=pair.head, strict=True, **(own if partial else {}))
    return Runtime.load(pair.target, config, dtype="bfloat16", executor=executor, **{**OPTIONS, **options})


def tokens_of(runtime: Runtime, count: int, max_tokens: int = 120) -> list[list[int]]:
    """Tokens of requests of many lengths, side by side."""
    params = [
        SamplingParams(seed=seed, max_tokens=max_tokens, temperature=0.7 * seed, ignore_eos=True) for seed in (0, 1)
    ]
    names = [runtime.submit(prompt_of(20 + 45 * k, k), params[k % 2]) for k in range(count)]
    tokens = run_all(runtime)
    return [tokens[name] for name in names]


@pytest.mark.parametrize("lossless", [False, True], ids=["lossy", "lossless"])
def test_every_group_does_what_its_operations_mean(pair: PairPaths, lossless: bool) -> None:
    with load(pair, "eager", lossless=lossless) as runtime:
        executor = runtime.executor
        assert isinstance(executor, EagerExecutor)
        draft = load_speculator(SpeculativeConfig(model=pair.head), load_target(pair.target, dtype="bfloat16").config)
        weights = {**load_target(pair.target, dtype="bfloat16").weights, **draft.weights}
        lockstep = Lockstep(executor, {name: tensor.cuda() for name, tensor in weights.items()})
        tokens_of(runtime, 4, 40)
        assert runtime.summary()["specpv"]["partial_steps"] > 20
        assert not lockstep.problems, "\n".join(lockstep.problems[:20])


def test_executors_loops_and_neighbours_change_no_token(pair: PairPaths, tmp_path: Path) -> None:
    """One at a time, side by side, in graphs, in loops on the device; what stays below the threshold is exact."""
    with load(pair, "eager") as runtime:
        expected = tokens_of(runtime, 4)
        assert runtime.summary()["specpv"]["refreshes"] > 12
    with load(pair, "eager", max_batch=1) as runtime:
        assert tokens_of(runtime, 4) == expected
    for loop in (False, True):
        with load(pair, "graph", device_loop=loop) as runtime:
            assert tokens_of(runtime, 4) == expected
    with load(pair, "graph", partial=False) as runtime:
        exact = tokens_of(runtime, 4)
    for loop in (False, True):
        with load(pair, "graph", device_loop=loop, lossless=True) as runtime:
            assert tokens_of(runtime, 4) == exact
            report = runtime.summary()["specpv"]
            assert report["partial_steps"] > 50 and report["accepted_tokens"] > 50 and not report["lossy"]
    assert [each[:15] for each in exact[:2]] == [each[:15] for each in expected[:2]]
