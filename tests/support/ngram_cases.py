"""Random texts for n-gram drafts, and the expected drafts, found in the plainest way."""

import random
from typing import Any

import torch
from kernel_cases import Arrays, Bench, poisoned

from lowlat.kernels.reference.speculation.ngram_draft import ngram_draft
from lowlat.kernels.speculation.ngram_draft import ngram_draft as kernel


def drafted(text: list[int], count: int, shortest: int, longest: int) -> list[int]:
    """The drafts after a text: for each length, the longest first, each place, the last first."""
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        for start in range(len(text) - 1, length - 1, -1):
            if text[start - length : start] == text[len(text) - length :]:
                whole = list(text)
                while len(whole) < len(text) + count:
                    whole.append(whole[start + len(whole) - len(text)])
                return whole[len(text) :]
    return []


def random_text(source: random.Random, length: int) -> list[int]:
    """A text that repeats itself: random tokens of a small alphabet, and copies of runs from before."""
    text = [source.randrange(source.choice((2, 5, 40))) for _ in range(min(length, source.randint(1, 6)))]
    while len(text) < length:
        if source.random() < 0.4:
            start = source.randrange(len(text))
            text += text[start : start + source.randint(1, 9)]
        else:
            text.append(source.randrange(40))
    return text[:length]


def check_ngram_draft(bench: Bench, seed: int, *, context: int, lengths: list[int], matches: tuple[int, int]) -> int:
    """Texts of these lengths, a dead slot and a pad among them, against the reference and the plain words.

    Returns how many slots drafted.
    """
    source = random.Random(seed)
    batch, rows = len(lengths) + 2, 1 + source.randint(1, 7)
    max_batch = batch + source.randint(0, 1)
    order = source.sample(range(max_batch), batch)
    texts = [random_text(source, length) for length in (*lengths, context, context)]
    arrays: Arrays = {
        "tokens": torch.randint(0, 40, (max_batch, context), dtype=torch.int32),
        "slots": torch.tensor([*order[:-1], -1], dtype=torch.int32),
        "draft_live": torch.tensor([1] * len(lengths) + [0, 1], dtype=torch.uint8),
        "draft_lens": torch.tensor([*lengths, 0, 0], dtype=torch.int32),
        "draft_nodes": poisoned(batch, rows),
    }
    for slot, text in zip(order, texts, strict=True):
        arrays["tokens"][slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
    options: dict[str, Any] = {"min_match": matches[0], "max_match": matches[1]}
    found = bench.compare(
        arrays,
        lambda given: ngram_draft(**{**given, **options}),
        lambda given: kernel(**{**given, **options}),
    )
    expected = [drafted(text, rows - 1, *matches) for text in texts[: len(lengths)]]
    nodes = [[-1, *(drafts or [-1] * (rows - 1))] for drafts in (*expected, [], [])]
    assert found["draft_nodes"].tolist() == nodes
    return sum(map(bool, expected))
