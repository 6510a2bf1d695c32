"""Rows that a draft model is trained on: written by the target itself, and text.

A row is up to `length` + 1 token ids with a mask of the tokens worth predicting; prompts and padding are not.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.training.corpus import pack
from bench.training.teacher import Teacher

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["WritingPlan", "load_rows", "mix_batches", "save_rows", "write_rows"]

Rows = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class WritingPlan:
    """How much the target writes: rows of `length` + 1 tokens, until `max_rows` or `minutes`, whichever is first."""

    length: int
    max_rows: int
    minutes: float
    batch: int
    answer_tokens: int
    temperature: float


def write_rows(
    teacher: Teacher, plan: WritingPlan, text: "NDArray[np.int32]", questions: Sequence[Sequence[int]]
) -> Rows:
    """Let the target answer the questions, or without any continue windows of the text.

    Two batches in five are greedy, the others sampled at the plan's temperature.
    result   tokens [rows, length + 1] int64, mask of what was written [rows, length + 1] bool
    """
    generator = np.random.default_rng(1)
    width = plan.length + 1
    questions = [question for question in questions if len(question) <= width // 2]
    order = generator.permutation(max(1, len(questions)))
    if questions:  # prompts of like length together, so that little is padding
        chunks = np.split(order, range(8 * plan.batch, len(order), 8 * plan.batch))
        order = np.concatenate([sorted(chunk, key=lambda i: len(questions[i])) for chunk in chunks])
    tokens: list[Tensor] = []
    keeps: list[Tensor] = []
    start, number, count = time.monotonic(), 0, 0
    while count < plan.max_rows and time.monotonic() - start < 60 * plan.minutes:
        if questions:
            picks = [order[(number * plan.batch + i) % len(order)] for i in range(plan.batch)]
            prompts = [list(questions[pick]) for pick in picks]
            room = min(plan.answer_tokens, width - max(len(prompt) for prompt in prompts))
        else:
            length = int(generator.integers(16, min(129, width // 2 + 1)))
            begins = generator.integers(0, len(text) - length, plan.batch)
            prompts = [text[begin : begin + length].tolist() for begin in begins]
            room = width - length
        temperature = 0.0 if number % 5 in (0, 2) else plan.temperature
        written = teacher.generate(prompts, room, temperature=temperature, stop=bool(questions))
        ids = torch.zeros(len(prompts), width, dtype=torch.int32)
        keep = torch.zeros(len(prompts), width, dtype=torch.bool)
        for row, (prompt, new) in enumerate(zip(prompts, written, strict=True)):
            ids[row, : len(prompt) + len(new)] = torch.tensor([*prompt, *new], dtype=torch.int32)
            keep[row, len(prompt) : len(prompt) + len(new)] = True
        tokens.append(ids)
        keeps.append(keep)
        number, count = number + 1, count + len(prompts)
    result = torch.cat(tokens), torch.cat(keeps)
    seconds = time.monotonic() - start
    print(f"the target wrote {int(result[1].sum())} tokens in {count} rows, {seconds:.0f} s", flush=True)
    return result


def save_rows(rows: Rows, path: str | Path) -> None:
    """Keep written rows for another run; ids are int32."""
    save_file({"tokens": rows[0].int().contiguous(), "keep": rows[1].contiguous()}, path)


def load_rows(path: str | Path) -> Rows:
    """Read what `save_rows` kept."""
    stored = load_file(path)
    return stored["tokens"], stored["keep"]


def _last_kept(keep: Tensor) -> Tensor:
    """Return the index after the last kept token of each row, [rows] int64."""
    width = keep.shape[1]
    return width - keep.flip(1).int().argmax(1)


def _own_batches(rows: Rows, batch: int, generator: np.random.Generator) -> Iterator[Rows]:
    tokens, keep = rows
    lengths = _last_kept(keep)
    while True:
        order = torch.from_numpy(generator.permutation(len(tokens)))
        for begin in range(0, len(order), 16 * batch):
            some = order[begin : begin + 16 * batch]
            some = some[lengths[some].argsort()]  # rows of like length together, so that little is padding
            groups = some.split(batch)
            for index in generator.permutation(len(groups)):
                picks = groups[int(index)]
                width = min(-(-(int(lengths[picks].max()) - 1) // 64) * 64 + 1, tokens.shape[1])
                yield tokens[picks, :width].long(), keep[picks, :width]


def _text_batches(text: "NDArray[np.int32]", length: int, batch: int, generator: np.random.Generator) -> Iterator[Rows]:
    while True:
        packed = torch.from_numpy(pack(text, length + 1, generator)).long()
        for some in packed.split(batch):
            yield some, torch.ones_like(some, dtype=torch.bool)


def mix_batches(
    text: "NDArray[np.int32]", rows: Rows, *, batch: int, length: int, text_lengths: Sequence[int], own_share: float
) -> Iterator[Rows]:
    """Yield batches without end: written rows with probability `own_share`, otherwise text, of each length in turn.

    All kinds hold about batch * length tokens.
    """
    generator = np.random.default_rng(2)
    own = _own_batches(rows, batch, generator)
    kinds = cycle([_text_batches(text, each, max(1, batch * length // each), generator) for each in text_lengths])
    while True:
        yield next(own if generator.random() < own_share else next(kinds))
