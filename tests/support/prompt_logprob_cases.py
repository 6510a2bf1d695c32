"""Random rows of prompts: what a pass takes of them, the ranks of their tokens, and what is kept for the host."""

import torch
from kernel_cases import Bench, poisoned
from row_cases import compare_alone

from lowlat.kernels.reference.step.slot_record import MAX_LOGPROBS
from lowlat.kernels.sampling.logprobs.prompt import keep_prompt_logprobs, take_prompt_rows, token_ranks

COLUMNS = MAX_LOGPROBS + 1


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check_taken(bench: Bench, *, width: int, positions: int, count: int, cursor: int, dtype: torch.dtype) -> None:
    """Rows from the cursor on; some have no token after them, others lie after the last."""
    arrays = {
        "residual": torch.randn(positions, width).to(dtype),
        "targets": torch.randint(-1, 9, (positions,), dtype=torch.int32),
        "count": ints(count),
        "cursor": ints(cursor),
        "out": poisoned(8, width, dtype=dtype),
    }
    compare_alone(bench, arrays, "take_prompt_rows", take_prompt_rows)


def check_ranks(bench: Bench, *, vocabulary: int) -> None:
    """Ranks among distinct and among equal logits, of both signs of zero too."""
    logits = torch.randn(6, vocabulary)
    logits[1:4] = logits[1:4].round()
    logits[3, ::2] *= -1.0
    targets = torch.randint(0, vocabulary, (1, 6), dtype=torch.int32)
    targets[0, 4] = -1
    live = torch.tensor([1, 1, 1, 1, 1, 0], dtype=torch.uint8)
    arrays = {"logits": logits, "row_live": live, "target_tokens": targets}
    found = compare_alone(bench, arrays, "token_ranks", token_ranks)["ranks"]
    for row in range(4):
        order = sorted(range(vocabulary), key=lambda token: (-float(logits[row, token]), token))
        assert order[int(found[0, row]) - 1] == int(targets[0, row])
    assert found[0, 4:].tolist() == [0, 0]


def check_kept(bench: Bench, *, rows: int, positions: int, count: int, cursor: int) -> int:
    """A pass's rows by position; returns the cursor after it."""
    arrays = {
        "logprob_values": torch.randn(1, rows, COLUMNS),
        "logprob_ids": torch.randint(-1, 99, (1, rows, COLUMNS), dtype=torch.int32),
        "ranks": torch.randint(0, 99, (1, rows), dtype=torch.int32),
        "count": ints(count),
        "cursor": ints(cursor),
        "prompt_logprob_values": poisoned(positions, COLUMNS, dtype=torch.float32),
        "prompt_logprob_ids": poisoned(positions, COLUMNS),
        "prompt_ranks": poisoned(positions),
    }
    return int(compare_alone(bench, arrays, "keep_prompt_logprobs", keep_prompt_logprobs)["cursor"])


def check_all(bench: Bench, *, width: int, vocabularies: tuple[int, ...]) -> None:
    """Every kernel: a first pass, one that ends a chunk, and one that reaches after it."""
    torch.manual_seed(5)
    for count, cursor in ((20, 0), (20, 8), (20, 16), (0, 0)):
        for dtype in (torch.bfloat16, torch.float32):
            check_taken(bench, width=width, positions=20, count=count, cursor=cursor, dtype=dtype)
        behind = check_kept(bench, rows=8, positions=20, count=count, cursor=cursor)
        assert behind == (cursor + 8 if cursor + 8 < count else 0)
    for vocabulary in vocabularies:
        check_ranks(bench, vocabulary=vocabulary)
