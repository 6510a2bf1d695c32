"""Metrics against naive recomputation from the list of steps."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowlat.engine.metrics import MetricsBook, RequestMetrics, RuntimeMetrics, SpeculativeDecodingStats
from lowlat.errors import RequestError


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[int, int, int | None]]:
    """(drafted, accepted, depth) of some steps: dead ones, chains and trees."""
    found: list[tuple[int, int, int | None]] = []
    for _ in range(draw(st.integers(0, 12))):
        drafted = draw(st.integers(0, 12))
        depth = None if draw(st.booleans()) or drafted == 0 else draw(st.integers(1, drafted))
        found.append((drafted, draw(st.integers(0, drafted if depth is None else depth)), depth))
    return found


def recorded(found: list[tuple[int, int, int | None]]) -> SpeculativeDecodingStats:
    stats = SpeculativeDecodingStats()
    for drafted, accepted, depth in found:
        stats.record(drafted, accepted, drafted_depth=depth)
    return stats


def naive(found: list[tuple[int, int, int | None]]) -> dict[str, Any]:
    drafts = [(d, a, d if depth is None else depth) for d, a, depth in found if d]
    count, drafted, accepted = len(drafts), sum(d for d, _, _ in drafts), sum(a for _, a, _ in drafts)
    at = [[a > i for _, a, depth in drafts if depth > i] for i in range(7)]
    return {
        "num_drafts": count,
        "total_draft_tokens": drafted,
        "total_accepted_tokens": accepted,
        "mean_acceptance_rate": accepted / drafted if drafted else 0.0,
        "mean_acceptance_length": 1 + accepted / count if count else 0.0,
        "fraction_accepted_ge2": sum(a >= 2 for _, a, _ in drafts) / count if count else 0.0,
        "num_rewound_tokens": drafted - accepted,
        "rewind_steps": sum(a < d for d, a, _ in drafts),
        "accepted_length_histogram": [sum(min(a, 7) == i for _, a, _ in drafts) for i in range(8)],
        "acceptance_by_position": [sum(x) / len(x) if x else 0.0 for x in at],
        "drafted_by_position": [len(x) for x in at],
        "accepted_by_position": [sum(x) for x in at],
        "by_source": {},
        "simulated": False,
    }


@given(found=steps())
def test_statistics_agree_with_recomputation(found: list[tuple[int, int, int | None]]) -> None:
    stats = recorded(found)
    assert json.loads(json.dumps(stats.to_dict())) == naive(found)
    for name, value in naive(found).items():
        assert getattr(stats, name) == value


@given(first=steps(), second=steps(), simulated=st.booleans())
def test_merging_is_recording_both(
    first: list[tuple[int, int, int | None]], second: list[tuple[int, int, int | None]], simulated: bool
) -> None:
    stats, other = recorded(first), recorded(second)
    other.simulated = simulated
    before = other.to_dict()
    stats.merge(other)
    assert stats.to_dict() == naive(first + second) | {"simulated": simulated}
    assert other.to_dict() == before


@pytest.mark.parametrize(
    ("drafted", "accepted", "depth"),
    [(2, 3, None), (0, 1, None), (3, -1, None), (-1, 0, None), (-1, -1, None), (4, 3, 2), (2, 1, 3), (2, 0, 0)],
)
def test_impossible_steps_are_refused_whole(drafted: int, accepted: int, depth: int | None) -> None:
    stats = recorded([(3, 1, None)])
    before = stats.to_dict()
    with pytest.raises(ValueError, match=f"cannot accept {accepted} of {drafted}"):
        stats.record(drafted, accepted, drafted_depth=depth)
    assert stats.to_dict() == before


def test_a_snapshot_stays() -> None:
    stats = recorded([(3, 1, None)])
    snapshot = stats.snapshot()
    metrics = RequestMetrics("r", speculation=stats)
    stats.record(3, 3)
    assert snapshot == recorded([(3, 1, None)]) == metrics.speculation


def test_the_block_is_absent_without_speculation() -> None:
    for stats in (None, SpeculativeDecodingStats(), recorded([(0, 0, None)])):
        metrics = RequestMetrics("r", speculation=stats)
        assert metrics.speculation is None
        assert "eagle_speculation" not in metrics.to_dict()
        assert "eagle_speculation" not in RuntimeMetrics(speculation=stats).to_dict()
    with_it = RequestMetrics("r", speculation=recorded([(3, 2, None)])).to_dict()
    assert with_it["eagle_speculation"]["mean_acceptance_length"] == 3.0
    assert "speculation" not in with_it


def test_sources_are_told_apart_and_steps_without_any_are_told() -> None:
    stats, other = SpeculativeDecodingStats(), SpeculativeDecodingStats()
    for drafted, accepted, source in ((3, 1, "eagle3"), (0, 0, "eagle3"), (4, 4, "suffix"), (2, 2, "eagle3")):
        stats.record(drafted, accepted, source=source)
    other.record(1, 1, source="grammar")
    other.merge(stats)
    found = RequestMetrics("r", num_steps=9, speculation=other).to_dict()["eagle_speculation"]["by_source"]
    assert found["eagle3"] == {"steps": 2, "draft_tokens": 5, "accepted_tokens": 3}
    assert [(name, each["steps"]) for name, each in found.items()] == [
        ("grammar", 1), ("eagle3", 2), ("suffix", 1), ("none", 5),
    ]  # fmt: skip


def test_request_metrics_as_json() -> None:
    given: dict[str, Any] = {
        "prompt_tokens": 10, "completion_tokens": 9, "reasoning_tokens": 3, "cached_prompt_tokens": 4, "queued_s": 0.1,
        "prefill_s": 0.2, "time_to_first_token_s": 0.4, "decode_s": 2.0, "num_steps": 3, "finish_reason": "length",
        "seed": 5,
    }  # fmt: skip
    found = json.loads(json.dumps(RequestMetrics("r", **given).to_dict()))
    assert found == {"request_id": "r", **given, "tokens_per_s": 4.0}
    assert RequestMetrics("r", completion_tokens=1).tokens_per_s == 0.0
    assert RequestMetrics("r", completion_tokens=1, decode_s=0.0).tokens_per_s == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_tokens": -1},
        {"completion_tokens": -1},
        {"num_steps": -1},
        {"decode_s": -0.1},
        {"queued_s": float("nan")},
        {"prompt_tokens": 2, "cached_prompt_tokens": 3},
    ],
)
def test_impossible_metrics_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=list(wrong)[-1]):
        RequestMetrics("r", **wrong)


def test_the_book_keeps_the_last_ended() -> None:
    book = MetricsBook(max_ended=3)
    for number in range(5):
        book.update(RequestMetrics(f"r{number}", completion_tokens=1))
        assert book.get(f"r{number}").finish_reason is None
        book.update(RequestMetrics(f"r{number}", completion_tokens=2, decode_s=0.5, finish_reason="stop"))
    book.update(RequestMetrics("live", completion_tokens=7))
    assert [book.get(f"r{number}").completion_tokens for number in (2, 3, 4)] == [2, 2, 2]
    for gone in ("r0", "r1", "never"):
        with pytest.raises(RequestError, match=f"no metrics of request '{gone}'.*more than 3 requests"):
            book.get(gone)
    totals = book.totals()
    assert (totals.num_requests, totals.num_live, totals.completion_tokens) == (5, 1, 17)
    assert totals.finish_reasons == {"stop": 5}
    with pytest.raises(ValueError, match="'r4' has ended already"):
        book.update(RequestMetrics("r4"))


def test_the_book_keeps_a_thousand() -> None:
    book = MetricsBook()
    for number in range(1001):
        book.update(RequestMetrics(str(number), finish_reason="length"))
    with pytest.raises(RequestError):
        book.get("0")
    assert book.get("1").finish_reason == "length"


@given(requests=st.lists(st.tuples(steps(), st.sampled_from([None, "stop", "error"]), st.integers(0, 9))))
def test_totals_are_sums(requests: list[tuple[list[tuple[int, int, int | None]], str | None, int]]) -> None:
    book = MetricsBook(max_ended=2)
    everything: list[tuple[int, int, int | None]] = []
    for number, (found, reason, tokens) in enumerate(requests):
        half = len(found) // 2
        for part, end in ((found[:half], None), (found, reason)):  # updated twice, counted once
            book.update(
                RequestMetrics(
                    str(number),
                    prompt_tokens=2 * tokens,
                    completion_tokens=tokens + 1,
                    cached_prompt_tokens=tokens,
                    num_steps=len(part),
                    decode_s=float(tokens),
                    finish_reason=end,
                    speculation=recorded(part),
                )
            )
        everything += found
    for _ in range(2):  # reading changes nothing
        totals = book.totals()
        tokens = sum(entry[2] for entry in requests)
        assert (totals.prompt_tokens, totals.completion_tokens) == (2 * tokens, tokens + len(requests))
        assert (totals.cached_prompt_tokens, totals.decode_s) == (tokens, tokens)
        assert totals.tokens_per_s == (1.0 if tokens else 0.0)
        assert totals.num_steps == len(everything)
        assert totals.num_live == sum(entry[1] is None for entry in requests)
        assert totals.num_requests == len(requests) - totals.num_live == sum(totals.finish_reasons.values())
        block = json.loads(json.dumps(totals.to_dict())).get("eagle_speculation")
        idle = sum(step[0] == 0 for step in everything)
        sources = {"none": {"steps": idle, "draft_tokens": 0, "accepted_tokens": 0}} if idle else {}
        drafted = any(step[0] for step in everything)
        assert block == (naive(everything) | {"by_source": sources} if drafted else None)
