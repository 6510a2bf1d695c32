"""Wide steps on a GPU: their kernels against the reference, and the tokens of a plain run in every executor."""

from collections.abc import Iterator
from typing import Any

import pytest
from kernel_cases import Bench
from proposal_cases import check_opening, check_texts
from recording import prompt_of, run_all
from suffix_cases import Options, check_suffix_draft
from tiny_models import KERNEL_HYBRID, PairPaths, make_pair, make_target

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.kernels.speculation.proposals import draft_from_texts, open_proposals

OPTIONS: dict[str, Any] = {"max_batch": 4, "max_context": 384, "block_size": 16, "prefill_chunk": 32} | {
    "device": "cuda",
    "dtype": "bfloat16",
}
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64}
HYBRID: dict[str, Any] = KERNEL_HYBRID | {"hidden_size": 128, "intermediate_size": 192}
FAMILIES = ("llama", "gpt_oss")
REPEATING = prompt_of(40) * 2
# of one slot, of two and of four at once; all repeat themselves before long, but for the last
REQUESTS: tuple[tuple[list[int], dict[str, Any]], ...] = (
    (REPEATING, {}),
    (REPEATING[:50], {"temperature": 0.1, "logprobs": 2}),
    (prompt_of(60, seed=3), {"temperature": 0.5, "presence_penalty": -2.0, "frequency_penalty": -0.5}),
    (prompt_of(30, seed=4), {"temperature": 1.0}),
)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [9, 513, 8192, 32768])
def test_named_texts_against_the_reference(size: int, bench: Bench) -> None:
    drafting = 0
    for seed in range(40 if size == 9 else 8):  # so short ones rarely go on where a slot's text ends
        drafting += check_texts(bench, seed, context=300, size=size, lengths=[1, 2, 200, 300], calls=draft_from_texts)
    assert drafting > 0


@pytest.mark.gpu
def test_openings_against_the_reference(bench: Bench) -> None:
    check_opening(bench, open_proposals)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("context", [1001, 16385])
def test_wide_searches_against_the_reference(context: int, rows: int, bench: Bench) -> None:
    for seed in range(6):
        lengths, options = [1, 3, 100 + seed, context], Options(32, 4.0, 0.1)
        check_suffix_draft(bench, seed, context=context, lengths=lengths, options=options, rows=rows)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    return make_pair(tmp_path_factory.mktemp(request.param), request.param, **SIZES)


def tokens_of(runtime: Runtime, count: int) -> list[list[int]]:
    """So many requests at once, one of which has a text named where that may be."""
    texts: dict[str, Any] = {"draft_texts": (tuple(REPEATING),)} if runtime.checks.num_text_tokens else {}
    names = [
        runtime.submit(prompt, SamplingParams(seed=7, max_tokens=200, ignore_eos=True, **own, **texts))
        for prompt, own in REQUESTS[:count]
    ]
    found = run_all(runtime)
    return [found[name] for name in names]


@pytest.fixture(scope="module")
def expected(pair: PairPaths) -> list[list[int]]:
    with Runtime.load(pair.target, executor="graph", **OPTIONS) as runtime:
        return tokens_of(runtime, len(REQUESTS))


@pytest.fixture(
    scope="module",
    params=[
        ("graph", "beside", 32, {}),
        ("graph", "suffix", 32, {"device_loop": True}),
        ("graph", "beside", 16, {"device_loop": True}),
        ("eager", "beside", 32, {}),
        ("eager", "suffix", 16, {"fuse": False}),
    ],
    ids=lambda given: "-".join(map(str, given[:3])),
)
def runtime(request: pytest.FixtureRequest, pair: PairPaths) -> Iterator[Runtime]:
    executor, method, rows, more = request.param
    own: dict[str, Any] = {"method": "suffix"} if method == "suffix" else {"model": pair.head, "text_drafts": "suffix"}
    config = SpeculativeConfig(num_speculative_tokens=3, wide_rows=rows, draft_text_tokens=128, strict=True, **own)
    made = Runtime.load(pair.target, config, executor=executor, **{**OPTIONS, **more})
    yield made
    made.close()


@pytest.mark.gpu
def test_wide_steps_change_nothing(runtime: Runtime, expected: list[list[int]]) -> None:
    for count in (1, 2, 4):
        before = num_wide(runtime)
        assert tokens_of(runtime, count) == expected[:count]
        assert num_wide(runtime) > before
    for _ in range(3):  # by what is cached, too, and whatever came before
        assert tokens_of(runtime, 1) == expected[:1]


def num_wide(runtime: Runtime) -> int:
    found: int = runtime.summary().get("wide_verification", {}).get("steps", 0)
    return found


@pytest.mark.gpu
def test_recurrent_states_take_wide_steps(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whose rings have as many pending rows as a wide step."""
    target = tmp_path_factory.mktemp("hybrid")
    make_target(target, "qwen3_5_text", gain=0.4, **HYBRID)
    with Runtime.load(target, executor="graph", **OPTIONS) as plain:
        wanted = tokens_of(plain, 2)
    config = SpeculativeConfig(method="suffix", num_speculative_tokens=3, wide_rows=32, strict=True)
    with Runtime.load(target, config, executor="graph", **OPTIONS) as runtime:
        assert tokens_of(runtime, 2) == wanted
        assert num_wide(runtime) > 0
