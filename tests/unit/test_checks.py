"""Checks of a step on the device: state that is wrong ends a request, or its drafts, and no token of a neighbour."""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import check_cases as cases
import pytest
import torch
from fake_device import load_fake
from recording import check_invariants
from stages import later, wide
from tiny_models import PairPaths, make_pair

from lowlat import Runtime, RuntimeConfig, SamplingParams, SpeculativeConfig
from lowlat.cli.options import bundled
from lowlat.engine.mailbox.failed_checks import TEXTS
from lowlat.errors import ConfigError
from lowlat.graphs.program import Op
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT

SIZES: dict[str, Any] = {"max_batch": 2, "max_context": 64, "block_size": 4, "prefill_chunk": 8, "device": "cpu"}
REQUESTS = {
    "hurt": ([5, 6, 7, 8] * 3, SamplingParams(max_tokens=16)),
    "neighbour": ([9, 2, 4], SamplingParams(max_tokens=16, temperature=1.0, seed=3)),
}
WAYS: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 3},
    "tree": {"num_speculative_tokens": 2, "tree": ((0,), (1,), (0, 0))},
    "dynamic tree": {"num_speculative_tokens": 3, "dynamic_tree_max_topk": 2, "max_total_draft_tokens": 7},
    "chosen widths": {"num_speculative_tokens": "auto"},
}
Arrays = Mapping[str, torch.Tensor]
Buffers = dict[str, torch.Tensor]
Spoil = Callable[[Arrays], object]


class OnlyReference:
    """Runs the reference alone."""

    def compare(self, arrays: Buffers, reference: Callable[[Buffers], object], calls: object) -> Buffers:
        found = {name: tensor.clone() for name, tensor in arrays.items()}
        reference(found)
        return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    return make_pair(tmp_path_factory.mktemp("pair"), "llama")


@pytest.fixture(scope="module")
def expected(pair: PairPaths) -> dict[str, list[int]]:
    """The tokens of a runtime that nothing disturbs, without speculation and checks."""
    with Runtime.load(pair.target, **SIZES) as runtime:
        return Run(runtime, "").tokens


def load(pair: PairPaths, way: str, **options: Any) -> Runtime:
    config = SpeculativeConfig(model=pair.head, strict=True, **WAYS[way])
    return Runtime.load(pair.target, config, **SIZES, **{"check": "all", **options})


class Runtimes:
    """Runtimes that make all checks, by the way of their drafts and what a failed check leads to, kept for all tests;
    each has a number for the names of its next requests."""

    def __init__(self, pair: PairPaths) -> None:
        self._pair = pair
        self._known: dict[tuple[str, str], Runtime] = {}
        self._numbers = itertools.count()

    def run(self, way: str, action: str, kind: str, spoil: Spoil, num: int = 2) -> "Run":
        """Run both requests, and spoil what the num-th operation of a kind wrote, of steps with both."""
        runtime = self.known(way, action)
        before = runtime.summary()["checks"]
        runtime.executor.set_hook(spoil_at(runtime.executor.state, kind, spoil, num))
        return Run(runtime, f"-{next(self._numbers)}", before)

    def known(self, way: str, action: str) -> Runtime:
        """The runtime itself."""
        if (way, action) not in self._known:
            self._known[way, action] = load(self._pair, way, on_failed_check=action)
        return self._known[way, action]

    def close(self) -> None:
        for runtime in self._known.values():
            runtime.close()


class Run:
    """Both requests run to their ends: tokens and last outputs by name, and what was counted."""

    def __init__(self, runtime: Runtime, suffix: str, before: dict[str, Any] | None = None) -> None:
        self.tokens: dict[str, list[int]] = {name: [] for name in REQUESTS}
        self.last: dict[str, Any] = {}
        for name, (prompt, params) in REQUESTS.items():
            runtime.submit(prompt, params, request_id=name + suffix)
        while runtime.busy:
            for output in runtime.step():
                name = output.request_id.removesuffix(suffix)
                self.tokens[name] += output.token_ids
                self.last[name] = output
        check_invariants(runtime)
        self.metrics = {name: runtime.metrics(name + suffix).to_dict() for name in REQUESTS}
        after = runtime.summary().get("checks", {})
        before = before or {"failed": dict.fromkeys(after.get("failed", ()), 0)}
        self.failed = {kind: count - before["failed"][kind] for kind, count in after.get("failed", {}).items()}
        self.ended, self.single = (
            after.get(name, 0) - before.get(name, 0) for name in ("ended_requests", "single_token_requests")
        )


@pytest.fixture(scope="module")
def runtimes(pair: PairPaths) -> Iterator[Runtimes]:
    made = Runtimes(pair)
    yield made
    made.close()


def spoil_at(state: Arrays, kind: str, spoil: Spoil, num: int) -> Callable[[Op, Arrays], None]:
    """A hook that spoils what the num-th operation of a kind has left, of those that have both requests' slots."""
    seen = iter(range(1 << 30))

    def hook(op: Op, arrays: Arrays) -> None:
        if op.kind == kind and (arrays["slots"] >= 0).sum() == 2 and next(seen) == num:
            spoil({**state, **arrays})

    return hook


def test_every_check_can_fail() -> None:
    """Each text has a case, and what is right fails no check."""
    found: set[int] = set()
    checks: dict[cases.Check, dict[str, cases.Wrong]] = {
        cases.check_slots: cases.SLOTS_WRONG,
        cases.check_rows: cases.ROWS_WRONG,
        cases.check_accepted: cases.ACCEPTED_WRONG,
        cases.check_commit: cases.COMMIT_WRONG,
    }
    for check, wrong in checks.items():
        for name in wrong:
            for seed in range(16):
                failed = check(OnlyReference(), seed, name)
                assert not failed or name != "nothing"
                found |= failed
    for seed in range(8):
        found |= cases.check_slots(OnlyReference(), seed, "length bounds", checks_lengths=False)
    assert found == set(TEXTS)


def zero_first_entry(arrays: Arrays) -> None:
    arrays["block_table"][0, 0] = 0


def make_dead(arrays: Arrays) -> None:
    """The last row, of which the mask is left."""
    arrays["num_verified"][0] -= arrays["row_live"][0, -1]
    arrays["row_live"][0, -1] = 0
    arrays["row_masks"][0, -1] = 5


# kind of check, the operation after which state is spoilt, how, and what is said of it
SPOILS: dict[str, tuple[str, str, Spoil, str]] = {
    "committed length": ("lengths", "commit", lambda a: a["lengths"][0].add_(1), "its committed length became"),
    "length between steps": ("lengths", "publish", lambda a: a["lengths"][0].sub_(1), "its last step left"),
    "accepted length": ("lengths", "accept", lambda a: a["accepted_lens"][0].fill_(40), "accepted 40 rows"),
    "count of drafts": ("lengths", "list_active_slots", lambda a: a["num_drafts"][0].fill_(-2), "of drafts is -2"),
    "limit": ("lengths", "list_active_slots", lambda a: a["slot_ints"][0, DRAFT_LIMIT].fill_(-1), "is -1, below 0"),
    "null block": ("spans", "list_active_slots", zero_first_entry, "entry 0 of its block table is the null block"),
    "the neighbour's block": (
        "spans",
        "list_active_slots",
        lambda a: a["block_table"][0, 3:5].copy_(a["block_table"][1, :2]),
        "entry 3 of its block table is",
    ),
    "position": ("spans", "gather_rows", lambda a: a["row_positions"][0, 0].fill_(99), "row 0 is at position 99"),
    "mask": ("masks", "gather_rows", lambda a: a["row_masks"][0, 0].fill_(3), "row 0 has mask 0x3, with bits beyond"),
}
DRAFTED: dict[str, tuple[str, str, Spoil, str]] = {
    "lost ancestor": ("masks", "gather_rows", lambda a: a["row_masks"][0, 1].fill_(2), "of mask 0x2 by 0x3"),
    "dead row": ("masks", "gather_rows", make_dead, "has mask 0x5"),
    "path": ("masks", "gather_rows", lambda a: a["paths"][0, :, 1:].fill_(-1), "is on no path"),
    "masks in state": ("masks", "publish", lambda a: a["tree_masks"][0, 1].fill_(1), "lacks its own bit 0x2"),
}
MENDED = ["accepted length", "count of drafts", "position", "mask", *DRAFTED]


def every_way(names: Iterable[str]) -> list[Any]:
    """Each name with a tree, and masks and positions with the other ways; some steps draft nothing."""
    cases = [("tree", name) for name in names]
    others = [(way, name) for way in WAYS for name in ("mask", "masks in state") if way != "tree" and name in names]
    drawn = [later(*case) for case in others if case[0] != "chosen widths" or case[1] in SPOILS]
    return cases + drawn


@pytest.mark.parametrize(("way", "name"), every_way([*SPOILS, *DRAFTED]))
def test_a_failed_check_ends_its_request_alone(
    way: str, name: str, runtimes: Runtimes, expected: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    kind, operation, spoil, text = {**SPOILS, **DRAFTED}[name]
    with caplog.at_level(logging.WARNING, "lowlat.engine.checks"):
        run = runtimes.run(way, "end", operation, spoil)
    assert run.tokens["neighbour"] == expected["neighbour"] and run.last["neighbour"].finish_reason == "length"
    assert run.tokens["hurt"] == expected["hurt"][: len(run.tokens["hurt"])] != expected["hurt"]
    hurt = run.last["hurt"]
    assert (hurt.finish_reason, hurt.error_code) == ("error", "check")
    assert hurt.error.startswith(f"check of {kind} failed for request {hurt.request_id!r} in slot 0: ")
    assert text in hurt.error
    (record,) = caplog.records
    assert record.getMessage() == f"{hurt.error}; the request ends"
    assert run.failed == {each: int(each == kind) for each in ("masks", "spans", "lengths")}
    assert (run.ended, run.single) == (1, 0)
    assert run.metrics["hurt"]["failed_checks"] == {kind: 1} and "failed_checks" not in run.metrics["neighbour"]


@pytest.mark.parametrize(("way", "name"), every_way(MENDED))
def test_a_request_goes_on_without_drafts(
    way: str, name: str, runtimes: Runtimes, expected: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """A failed step's results are dropped; the tokens come from steps of one token, the neighbour's with drafts."""
    kind, operation, spoil, _ = {**SPOILS, **DRAFTED}[name]
    with caplog.at_level(logging.WARNING, "lowlat.engine.checks"):
        run = runtimes.run(way, "single", operation, spoil)
    assert run.tokens == expected
    assert {each.finish_reason for each in run.last.values()} == {"length"}
    assert run.metrics["hurt"]["failed_checks"] == {kind: 1}
    assert (run.ended, run.single) == (0, 1)
    assert "goes on without drafts" in caplog.text and repr(run.last["hurt"].request_id) in caplog.text


def test_a_second_failure_ends_it(runtimes: Runtimes, expected: dict[str, list[int]]) -> None:
    """A failure that remains in steps of one token ends the request."""
    run = runtimes.run("tree", "single", "list_active_slots", zero_first_entry)
    assert run.tokens["neighbour"] == expected["neighbour"]
    assert run.tokens["hurt"] == expected["hurt"][: len(run.tokens["hurt"])] != expected["hurt"]
    assert run.last["hurt"].error_code == "check"
    assert run.metrics["hurt"]["failed_checks"] == {"spans": 2} and (run.ended, run.single) == (1, 1)


def test_a_limit_set_later_brings_no_drafts_back(runtimes: Runtimes) -> None:
    runtime = runtimes.known("tree", "single")
    runtime.executor.set_hook(None)
    runtime.submit([1, 2], SamplingParams(max_tokens=30), request_id="limited")
    hurt = False
    while runtime.busy:
        for output in runtime.step():
            assert not hurt or len(output.token_ids) == 1
        if not hurt and not runtime.metrics("limited").failed_checks:
            runtime.executor.state["tree_masks"][:, 1] = 1
        elif runtime.busy:
            hurt = True
            runtime.set_draft_limit("limited", 3)
    assert hurt and runtime.metrics("limited").finish_reason == "length"


@pytest.mark.parametrize("looping", [False, True], ids=["ahead", "loops"])
@pytest.mark.parametrize("action", ["end", "single"])
def test_steps_that_were_launched_ahead_leave_the_slot_alone(
    action: str, looping: bool, pair: PairPaths, expected: dict[str, list[int]]
) -> None:
    draft = SpeculativeConfig(model=pair.head, strict=True, **WAYS["tree"])
    sizes = {name: value for name, value in SIZES.items() if name != "device"}
    checks: dict[str, Any] = {"check": "all", "on_failed_check": action}
    runtime, device = load_fake(pair.target, draft, device_loop=looping, seed=5, lead=2, **checks, **sizes)
    with runtime:
        device.set_hook(spoil_at(device.state, "gather_rows", SPOILS["mask"][2], 2))
        run = Run(runtime, "")
        assert run.tokens["neighbour"] == expected["neighbour"]
        assert run.tokens["hurt"] == expected["hurt"][: len(run.tokens["hurt"])]
        assert run.last["hurt"].finish_reason == ("error" if action == "end" else "length")


@pytest.mark.parametrize("action", ["end", "single"])
def test_a_first_token_is_checked(action: str, runtimes: Runtimes, expected: dict[str, list[int]]) -> None:
    """No token is given, whatever a failed check is to lead to: the prompt's last position has no other step."""

    def spoil(op: Op, arrays: Arrays) -> None:
        if op.kind == "apply_commands":
            arrays["lengths"][arrays["lengths"] == 3] += 1  # of the neighbour, which joins

    with_both = runtimes.run("tree", action, "list_active_slots", lambda arrays: None)
    assert with_both.tokens == expected
    runtime = runtimes.known("tree", action)
    runtime.executor.set_hook(spoil)
    run = Run(runtime, f"-first-{action}", runtime.summary()["checks"])
    assert run.tokens == {"hurt": expected["hurt"], "neighbour": []}
    assert run.last["neighbour"].error_code == "check" and "committed length is 4" in run.last["neighbour"].error
    assert (run.ended, run.single) == (1, 0)


def spoil_drafts_of_slot_1(arrays: Arrays) -> None:
    arrays["num_drafts"][1] = -2


@pytest.mark.second
@pytest.mark.parametrize("action", [wide("end"), "single"])
def test_a_request_with_a_grammar_is_dropped_before_its_rows_are_told(action: str) -> None:
    """The host waits for no rows of it; on steps of one token it goes on under its grammar."""
    prompt, params = "The", SamplingParams(max_tokens=24, regex="[a-z ]{40,60}", ignore_eos=True)
    sizes: dict[str, Any] = {"max_batch": 2, "max_context": 128, "device": "cpu"}
    drafted = SpeculativeConfig(model=bundled("head"), num_speculative_tokens=3, strict=True)
    tokens: dict[bool, list[int]] = {}
    for hurts in (False, True):
        own: dict[str, Any] = {"check": "all", "on_failed_check": action} if hurts else {}
        with Runtime.load(bundled("target"), drafted, **sizes, **own) as runtime:
            runtime.submit([5, 6, 7], SamplingParams(max_tokens=24, ignore_eos=True))  # which has slot 0
            name = runtime.submit(prompt, params)
            if hurts:
                hook = spoil_at(runtime.executor.state, "list_active_slots", spoil_drafts_of_slot_1, 2)
                runtime.executor.set_hook(hook)
            outputs = []
            while runtime.busy:
                outputs += [output for output in runtime.step() if output.request_id == name]
            tokens[hurts] = [token for output in outputs for token in output.token_ids]
            assert outputs[-1].error_code == ("check" if hurts and action == "end" else None)
    assert tokens[True] == (tokens[False] if action == "single" else tokens[False][: len(tokens[True])])


@pytest.mark.parametrize("check", [None, "masks", "masks, lengths"])
def test_a_program_has_what_was_asked_for(check: str | None, pair: PairPaths, expected: dict[str, list[int]]) -> None:
    """Nothing fails where nothing is wrong; without checks there is no operation and no buffer of theirs."""
    with load(pair, "chain", check=check) as runtime:
        run = Run(runtime, "")
        assert run.tokens == expected
        assert run.failed == dict.fromkeys([kind for kind in ("masks", "spans", "lengths") if kind in (check or "")], 0)
        kinds = {op.kind for op in runtime.executor.program(runtime.ladder.choose(2, 3)).ops}
        made = {"check_slots", "check_rows", "check_commit"} if check else set[str]()
        made |= {"check_accepted"} if "lengths" in (check or "") else set()
        assert {kind for kind in kinds if kind.startswith("check_")} == made
        assert ("ring_checks" in runtime.executor.state) == ("checks" in runtime.summary()) == bool(check)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"check": ["masks"]}, "check must be kinds of checks, masks, spans, lengths, got"),
        ({"check": "mask"}, "check names 'mask'; the kinds are masks, spans, lengths, or all"),
        ({"on_failed_check": "single"}, "needs check"),
        ({"check": "all", "on_failed_check": "stop"}, "on_failed_check must be 'end' or 'single'"),
        ({"check": "all", "tensor_parallel_size": 2}, "check is not implemented for tensor_parallel_size 2"),
        ({"check": "all", "perf_mode": "strict"}, "check 'all' is for debugging"),
    ],
)
def test_options_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        RuntimeConfig(**options)
