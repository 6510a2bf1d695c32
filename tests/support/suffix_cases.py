"""Texts for suffix drafts, and the expected drafts, found in the plainest way."""

import random
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import torch
from kernel_cases import Arrays, Bench, poisoned
from ngram_cases import random_text

from lowlat.kernels.reference.speculation.choose_drafts import CHOSEN, NUM_BINS, PROPOSAL_WIDTH, choose_drafts
from lowlat.kernels.reference.speculation.suffix_draft import SHARE, suffix_draft
from lowlat.kernels.speculation.suffix_draft import suffix_draft as kernel


class Options(NamedTuple):
    """The options of suffix drafts."""

    max_depth: int = 24
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1


def drafted(text: list[int], count: int, options: Options) -> tuple[int, list[int], list[int]]:
    """The ending's length, the drafts, and their shares in 1024ths."""
    places = [place for place in range(1, len(text)) if text[place - 1] == text[-1]]
    reaches = {}
    for place in places:
        reach = 1
        while reach < min(options.max_depth, place) and text[place - 1 - reach] == text[-1 - reach]:
            reach += 1
        reaches[place] = reach
    sample = sorted(places, key=lambda place: (-reaches[place], -place))[:32]
    best: tuple[Fraction, int, list[int], list[int]] = (Fraction(0), 0, [], [])
    for length in range(1, options.max_depth + 1):
        lines = [text[place:] for place in sample if reaches[place] >= length]  # the last place first, if all are kept
        lines.sort(key=len)
        lines = [(line * (count + 1))[:count] for line in lines]
        every, drafts, shares = len(lines), list[int](), list[Fraction]()
        limit = min(count, int(length * Fraction(str(options.max_spec_factor))))
        while lines and len(drafts) < limit:
            following = [line[len(drafts)] for line in lines]
            token = max(following, key=following.count)  # the first of equals
            share = Fraction(following.count(token), every)
            if share < Fraction(str(options.min_token_prob)):
                break
            lines = [line for line in lines if line[len(drafts)] == token]
            drafts.append(token)
            shares.append(share)
        if drafts and sum(shares) >= best[0]:
            best = (sum(shares, Fraction(0)), length, drafts, [int(share * 1024) for share in shares])
    return best[1:]


def expected_rows(texts: list[list[int]], rows: int, options: Options) -> tuple[list[list[int]], ...]:
    """Nodes, shares and lengths of texts as the operation writes them."""
    found = [drafted(text, rows - 1, options) for text in texts]
    nodes = [[-1, *drafts, *[-1] * (rows - 1 - len(drafts))] for _, drafts, _ in found]
    shares = [[0, *each, *[0] * (rows - 1 - len(each))] for _, _, each in found]
    return nodes, shares, [[length] for length, _, _ in found]


def arguments(texts: list[list[int]], rows: int, context: int) -> Arrays:
    """Return the operation's arguments for one text a slot."""
    batch = len(texts)
    tokens = torch.full((batch, context), -7, dtype=torch.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = torch.tensor(text, dtype=torch.int32)
    return {
        "tokens": tokens,
        "slots": torch.arange(batch, dtype=torch.int32),
        "draft_live": torch.ones(batch, dtype=torch.uint8),
        "draft_lens": torch.tensor([len(text) for text in texts], dtype=torch.int32),
        "draft_nodes": poisoned(batch, rows),
        "draft_shares": poisoned(batch, rows),
        "match_lens": poisoned(batch),
    }


def check_suffix_draft(
    bench: Bench,
    seed: int,
    *,
    context: int,
    lengths: list[int],
    options: Options,
    calls: Any = kernel,
    rows: int | None = None,
) -> int:
    """Texts of these lengths, after them a dead slot and a pad, against the reference. Returns the drafts' number."""
    source = random.Random(seed)
    rows = 1 + source.randint(1, 7) if rows is None else rows
    texts = [random_text(source, length) for length in (*lengths, 9, 9)]
    if seed % 2:  # many places, most of which are left out
        texts[-3] = [source.choice((1, 1, 1, 2)) for _ in texts[-3]]
    arrays = arguments(texts, rows, context)
    arrays["draft_live"][-2], arrays["slots"][-1] = 0, -1
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))
    arrays["tokens"] = arrays["tokens"][torch.argsort(order)]
    arrays["slots"][:-1] = order[:-1].int()
    values: dict[str, Any] = options._asdict()
    found = bench.compare(
        arrays,
        lambda given: suffix_draft(**{**given, **values}),
        lambda given: calls(**{**given, **values}),
    )
    return int((found["draft_nodes"] >= 0).sum())


class World:
    """A few slots, one of them not drafting and one a pad, with what the operation keeps of them."""

    def __init__(self, seed: int, rows: int) -> None:
        self.source, self.rows = random.Random(seed), rows
        ints: dict[str, Any] = {"dtype": torch.int32}
        self.arrays: Arrays = {
            "tokens": torch.full((5, 64), -7, **ints),
            "slots": torch.tensor([3, 0, 4, -1], **ints),
            "draft_live": torch.tensor([1, 1, 0, 1], dtype=torch.uint8),
            "draft_lens": torch.tensor([4, 9, 0, 0], **ints),
            "text_nodes": torch.zeros(4, rows, **ints),
            "draft_shares": torch.zeros(4, rows, **ints),
            "match_lens": torch.zeros(4, **ints),
            "draft_nodes": torch.zeros(4, rows, **ints),
            "proposals": torch.full((5, PROPOSAL_WIDTH), 99, **ints),
            "draft_probabilities": torch.full((5, 2, NUM_BINS, 2), 99, **ints),
            "draft_sources": torch.full((5,), 99, **ints),
        }

    def go_on(self) -> None:
        """Some tokens, of two kinds so that drafts are often right, and new proposals of any length."""
        arrays, source = self.arrays, self.source
        arrays["draft_nodes"], arrays["text_nodes"] = (torch.full_like(arrays["draft_nodes"], -1) for _ in range(2))
        arrays["draft_shares"].zero_()
        for index in range(2):
            slot, length = int(arrays["slots"][index]), int(arrays["draft_lens"][index])
            after = min(64, length + source.randint(1, 8))
            arrays["tokens"][slot, length:after] = torch.tensor(source.choices((1, 2), k=after - length))
            arrays["draft_lens"][index] = after
            for name, limit in (("draft_nodes", self.rows - 1), ("text_nodes", source.randrange(self.rows))):
                for node in range(1, limit + 1):
                    arrays[name][index, node] = source.choice((1, 1, 2))
            shares = sorted((source.randint(1, SHARE) for _ in range(limit)), reverse=True)
            arrays["draft_shares"][index, 1 : limit + 1] = torch.tensor(shares)
            arrays["match_lens"][index] = source.randint(1, 12) if limit else 0


def check_choose_drafts(bench: Bench, rows: int, calls: Any) -> None:
    """Some steps in a row against the reference; now the model's drafts are chosen and now the text's."""
    world, choices = World(rows, rows), []
    for step in range(12):
        world.go_on()
        fresh = step == 0
        world.arrays = bench.compare(
            world.arrays, partial(_reference, fresh=fresh), partial(_calls, calls=calls, fresh=fresh)
        )
        choices += world.arrays["proposals"][[3, 0], CHOSEN].tolist()
        assert torch.equal(world.arrays["draft_sources"][[3, 0]], world.arrays["proposals"][[3, 0], CHOSEN])
        assert world.arrays["proposals"][[1, 2, 4]].eq(99).all()  # of slots that do not draft
    assert 0 < sum(choices) < len(choices)


def _reference(given: Arrays, fresh: bool) -> None:
    choose_drafts(**given, fresh=fresh)


def _calls(given: Arrays, calls: Any, fresh: bool) -> Any:
    return calls(given, fresh=fresh)
