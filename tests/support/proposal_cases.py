"""Openings of wide steps and named texts, and the expected drafts, found in the plainest way."""

import random
from typing import Any

import torch
from kernel_cases import Arrays, Bench, poisoned
from ngram_cases import random_text

from lowlat.kernels.reference.speculation.proposals import draft_from_texts, open_proposals
from lowlat.kernels.reference.speculation.suffix_draft import SHARE

SIZES: dict[str, Any] = {"max_depth": 6, "max_spec_factor": 2.0}


def followed(text: list[int], named: list[int], depth: int) -> tuple[int, int]:
    """The longest ending of a text that stands in named ones, and the last such place after it with a token."""
    best = (0, 0)
    for place in range(1, len(named)):
        reach = 0
        while reach < min(depth, place, len(text)) and named[place - 1 - reach] == text[-1 - reach]:
            reach += 1
        if reach and named[place] >= 0:
            best = max(best, (reach, place))
    return best


def expected(text: list[int], named: list[int], own: int, count: int, options: dict[str, Any]) -> tuple[int, list[int]]:
    """The ending's length and the drafts, where they are in place of those of an own ending of so many tokens."""
    reach, place = followed(text, named, options["max_depth"])
    if reach <= own:
        return own, []
    drafts = named[place : place + min(count, int(reach * options["max_spec_factor"]))]
    return reach, drafts[: drafts.index(-1)] if -1 in drafts else drafts


def named_texts(source: random.Random, size: int) -> list[int]:
    """Some texts, -1 after each; they may be none."""
    found: list[int] = []
    while len(found) < size and source.random() < 0.8:
        found += [*random_text(source, source.randint(1, max(1, (size - len(found)) // 2))), -1]
    return found[:size]


def text_arguments(source: random.Random, rows: int, context: int, size: int, lengths: list[int]) -> Arrays:
    """Arguments of `draft_from_texts`: slots with texts of these lengths, then one that is not live, and a pad."""
    batch = len(lengths) + 2
    texts = [random_text(source, length) for length in (*lengths, 3, 3)]
    named = [named_texts(source, size) for _ in range(batch)]
    tokens, memory = (
        torch.full((batch, context), -7, dtype=torch.int32),
        torch.full((batch, size), 5, dtype=torch.int32),
    )
    order = list(range(batch))
    source.shuffle(order)
    for slot, text, own in zip(order, texts, named, strict=True):
        tokens[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
        memory[slot, : len(own)] = torch.tensor(own, dtype=torch.int32)
    lens = torch.zeros(batch, dtype=torch.int32)
    lens[order] = torch.tensor([len(own) for own in named], dtype=torch.int32)
    live = torch.ones(batch, dtype=torch.uint8)
    live[-2] = 0
    generator = torch.Generator().manual_seed(source.getrandbits(32))
    return {
        "tokens": tokens,
        "slots": torch.tensor([*order[:-1], -1], dtype=torch.int32),
        "draft_live": live,
        "draft_lens": torch.tensor([len(text) for text in texts], dtype=torch.int32),
        "draft_texts": memory,
        "draft_text_lens": lens,
        "draft_nodes": torch.randint(9, (batch, rows), generator=generator, dtype=torch.int32),
        "draft_shares": torch.full((batch, rows), 77, dtype=torch.int32),
        "match_lens": torch.randint(2, (batch,), generator=generator, dtype=torch.int32),
    }


def check_texts(bench: Bench, seed: int, *, context: int, size: int, lengths: list[int], calls: Any) -> int:
    """Named texts against the reference; returns how many slots draft from them."""
    source = random.Random(seed)
    arrays = text_arguments(source, source.choice((2, 5, 8, 16, 32)), context, size, lengths)
    found = bench.compare(arrays, lambda given: _reference(given), lambda given: calls(**given, **SIZES))
    return int((found["draft_shares"] == SHARE).any(1).sum())


def _reference(given: dict[str, Any]) -> None:
    draft_from_texts(**given, **SIZES)


def check_opening(bench: Bench, calls: Any) -> None:
    """Openings against the reference, next to a draft model and without one."""
    for source in (1, 2):
        for slots in ([2, 0, -1, -1], [3], [-1, -1], [1, 2, 3, 0]):
            batch = len(slots)
            arrays: Arrays = {
                "slots": torch.tensor(slots, dtype=torch.int32),
                "lengths": torch.tensor([7, 9, 11, 13], dtype=torch.int32),
                "draft_live": torch.full((batch,), 9, dtype=torch.uint8),
                "draft_lens": poisoned(batch),
                "draft_sources": torch.full((4,), 5, dtype=torch.int32),
            }
            found = bench.compare(
                arrays,
                lambda given, source=source: open_proposals(**given, source=source),  # type: ignore[misc]
                lambda given, source=source: calls(**given, source=source),  # type: ignore[misc]
            )
            assert found["draft_lens"].tolist() == [0 if slot < 0 else 7 + 2 * slot for slot in slots]
            assert found["draft_sources"].tolist() == [source - 1 if slot in slots else 5 for slot in range(4)]
