"""What kinds of traffic find of their prompts, in pools and tiers that are too small for all of it."""

import pytest
from prefix_traffic import CHUNK, PART, Traffic


def in_turn(traffic: Traffic, num: int, length: int, turns: int, more: int) -> float:
    """Conversations that go on in turn; returns the share of positions found that had been read before."""
    texts, found, known = [traffic.text(length) for _ in range(num)], 0, 0
    for turn in range(turns):
        for text in texts:
            found += traffic.ask(text)
            known += (len(text) - more) // CHUNK * CHUNK if turn else 0
            text += traffic.text(more)
    traffic.close()
    return found / known


@pytest.mark.parametrize(
    ("kind", "host_chunks", "least"),
    [("plain", 150, 0.7), ("gpt-oss", 200, 0.7), ("hybrid", 200, 0.6), ("hybrid", 300, 1.0)],
)
def test_conversations_in_turn_find_what_host_memory_holds_where_it_is_too_small_for_all(
    kind: str, host_chunks: int, least: float
) -> None:
    traffic = Traffic(kind, max_context=9000, snapshots=3, host_chunks=host_chunks)
    assert in_turn(traffic, num=4, length=6000, turns=4, more=300) >= least  # 188 to 209 chunks


@pytest.mark.parametrize("kind", ["plain", "gpt-oss", "gemma", "hybrid"])
def test_conversations_in_turn_find_all_that_fits_the_device(kind: str) -> None:
    assert in_turn(Traffic(kind), num=4, length=2000, turns=5, more=350) == 1.0


def test_the_second_question_about_a_document_goes_on_from_host_memory() -> None:
    traffic = Traffic("gpt-oss", max_context=9000, host_chunks=500)
    documents = [traffic.text(6000) for _ in range(4)]
    found = [[traffic.ask([*text, *traffic.text(300)]) for text in documents] for _ in range(3)]
    assert found == [[0] * 4] + [[6000 // CHUNK * CHUNK] * 4] * 2
    traffic.close()


@pytest.mark.parametrize("kind", ["plain", "gpt-oss", "hybrid"])
@pytest.mark.parametrize("idle", [0, 10])
def test_retries_of_a_prompt_that_is_broken_off_come_further(kind: str, idle: int) -> None:
    traffic = Traffic(kind)
    for _ in range(idle):  # more of them than there are snapshots
        traffic.ask(traffic.text(3000))
    prompt = traffic.text(60_000)
    found = [traffic.ask(prompt, num_parts=3) for _ in range(8)]
    assert found == sorted(found) and found[-1] >= 4 * 3 * PART - PART
    if kind != "hybrid" or not idle:
        assert found == [number * 3 * PART for number in range(8)]
    traffic.close()


@pytest.mark.parametrize("kind", ["plain", "gpt-oss", "gemma", "hybrid"])
def test_a_system_prompt_is_found_from_the_third_request_on(kind: str) -> None:
    traffic = Traffic(kind)
    system = traffic.text(64 * CHUNK)
    found = [traffic.ask([*system, *traffic.text(2000)]) for _ in range(10)]
    assert found[0] == 0 and found[2:] == [64 * CHUNK] * 8
    traffic.close()
