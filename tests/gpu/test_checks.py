"""The checks of a step on a GPU: kernels against their references, and state that is spoilt between captured steps."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import check_cases as cases
import pytest
import torch
from kernel_cases import Bench
from recording import check_invariants, prompt_of
from tiny_models import PairPaths, make_pair

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, MAX_LENGTH

CASES = [
    *((cases.check_slots, wrong) for wrong in cases.SLOTS_WRONG),
    *((cases.check_rows, wrong) for wrong in cases.ROWS_WRONG),
    *((cases.check_accepted, wrong) for wrong in cases.ACCEPTED_WRONG),
    *((cases.check_commit, wrong) for wrong in cases.COMMIT_WRONG),
]
OPTIONS: dict[str, Any] = {"max_batch": 4, "max_context": 512, "block_size": 16, "prefill_chunk": 32} | {
    "device": "cuda",
    "dtype": "bfloat16",
    "executor": "graph",
}
WAYS: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 3},
    "tree": {"num_speculative_tokens": 2, "tree": ((0,), (1,), (0, 0))},
    "dynamic tree": {"num_speculative_tokens": 3, "dynamic_tree_max_topk": 2, "max_total_draft_tokens": 7},
}
REQUESTS = {
    "hurt": (prompt_of(70, 1), SamplingParams(max_tokens=60, ignore_eos=True)),
    "neighbour": (prompt_of(40, 2), SamplingParams(max_tokens=60, temperature=1.0, seed=3, ignore_eos=True)),
}
State = Mapping[str, torch.Tensor]
# kind, what is spoilt of slot 0 between two steps, and whether steps of one token mend it
SPOILS: dict[str, tuple[str, Callable[[State], object], bool]] = {
    "length": ("lengths", lambda state: state["lengths"][0].sub_(1), False),
    "longest": ("lengths", lambda state: state["slot_ints"][0, MAX_LENGTH].fill_(1 << 20), False),
    "limit": ("lengths", lambda state: state["slot_ints"][0, DRAFT_LIMIT].fill_(-1), False),
    "drafts": ("lengths", lambda state: state["num_drafts"][0].fill_(-3), True),
    "null block": ("spans", lambda state: state["block_table"][0, 1].zero_(), False),
    "block": ("spans", lambda state: state["block_table"][0, 4].fill_(1 << 28), False),
    "the neighbour's": ("spans", lambda state: state["block_table"][0].copy_(state["block_table"][1]), False),
    "own bit": ("masks", lambda state: state["tree_masks"][0, 1].fill_(1), True),
    "later bit": ("masks", lambda state: state["tree_masks"][0, 1].fill_(1 << 40 | 2), True),
}


@pytest.mark.parametrize(("check", "wrong"), CASES, ids=lambda each: getattr(each, "__name__", each))
def test_against_the_reference(check: cases.Check, wrong: str, bench: Bench) -> None:
    for seed in range(30, 40):
        check(bench, seed, wrong, batch=4)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64, "max_position_embeddings": 1024}
    return make_pair(tmp_path_factory.mktemp("pair"), "llama", **sizes)


def load(pair: PairPaths, way: str, **options: Any) -> Runtime:
    config = SpeculativeConfig(model=pair.head, strict=True, **WAYS[way])
    return Runtime.load(pair.target, config, **OPTIONS, **options)


def run(
    runtime: Runtime, suffix: str, spoil: Callable[[State], object] | None = None, **depth: int
) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """The tokens and the last output of both requests, whose state is spoilt before their sixth step.

    depth  given, steps are launched one by one, so that nothing is under way when state is spoilt
    """
    tokens: dict[str, list[int]] = {name: [] for name in REQUESTS}
    last: dict[str, Any] = {}
    for name, (prompt, params) in REQUESTS.items():
        runtime.submit(prompt, params, request_id=name + suffix)
    number = 0
    while runtime.busy:
        both = [slot["phase"] for slot in runtime.slots()] == ["decoding", "decoding"]
        number += both
        if spoil is not None and both and number == 6:
            spoil(runtime.executor.state)
            torch.cuda.synchronize()
        for output in runtime.step(**depth):
            name = output.request_id.removesuffix(suffix)
            tokens[name] += output.token_ids
            last[name] = output
    check_invariants(runtime)
    return tokens, last


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(pair: PairPaths, way: str) -> dict[str, list[int]]:
    with load(pair, way) as runtime:
        return run(runtime, "")[0]


@pytest.fixture(scope="module", params=["end", "single"])
def checked(request: pytest.FixtureRequest, pair: PairPaths, way: str) -> Iterator[Runtime]:
    with load(pair, way, check="all", on_failed_check=request.param) as runtime:
        yield runtime


def test_checks_change_no_token(checked: Runtime, expected: dict[str, list[int]]) -> None:
    before = checked.summary()["checks"]
    assert run(checked, "-right")[0] == expected
    assert checked.summary()["checks"] == before


@pytest.mark.parametrize("name", SPOILS)
def test_spoilt_state_hurts_one_request(name: str, checked: Runtime, expected: dict[str, list[int]]) -> None:
    kind, spoil, mends = SPOILS[name]
    single = checked.config.on_failed_check == "single"
    depth = {"num_speculative_tokens": checked.num_speculative_tokens}
    before = checked.summary()["checks"]["failed"]
    tokens, last = run(checked, f"-{name}", spoil, **depth)
    failed = checked.summary()["checks"]["failed"]
    assert tokens["neighbour"] == expected["neighbour"]
    if single and mends:
        assert tokens["hurt"] == expected["hurt"] and last["hurt"].finish_reason == "length"
    else:
        assert tokens["hurt"] == expected["hurt"][: len(tokens["hurt"])] != expected["hurt"]
        assert (last["hurt"].finish_reason, last["hurt"].error_code) == ("error", "check")
        assert f"check of {kind} failed for request {f'hurt-{name}'!r} in slot 0: " in last["hurt"].error
    counts = {each: failed[each] - before[each] for each in failed}
    limited = name == "limit"  # below 0 there are no drafts to fall back from
    assert counts == {**dict.fromkeys(failed, 0), kind: 2 if single and not mends and not limited else 1}


@pytest.mark.parametrize("looping", [False, True], ids=["ahead", "loops"])
def test_steps_ahead_and_loops_leave_a_dropped_slot_alone(looping: bool, pair: PairPaths) -> None:
    """State is spoilt while steps run: whichever finds it drops the slot, and those after it have no drafts for it."""
    with (
        load(pair, "chain") as plain,
        load(pair, "chain", check="all", on_failed_check="single", device_loop=looping) as runtime,
    ):
        expected, _ = run(plain, "")
        tokens, last = run(runtime, "", lambda state: state["slot_ints"][0, MAX_LENGTH].fill_(1 << 20))
        assert tokens["neighbour"] == expected["neighbour"]
        assert tokens["hurt"] == expected["hurt"][: len(tokens["hurt"])]
        assert last["hurt"].error_code == "check" and runtime.summary()["checks"]["failed"]["lengths"] == 2
