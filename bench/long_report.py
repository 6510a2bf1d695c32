"""Tables in Markdown of what `bench.long_contexts` and the training before it have written.

    python -m bench.long_report RESULTS/long_contexts.json --training RESULTS/long_training.json

Acceptance and speed have a table for each temperature: a line is a draft model, a column a context. Loss has one: a
line is a target and a group of texts, a column a range of positions.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["acceptance_tables", "loss_table", "main"]


def acceptance_tables(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the tables over all texts: acceptance length, and speed over that at S = 0; by temperature."""
    rows = [row for row in rows if row["texts"] == "all"]
    contexts = sorted({row["context"] for row in rows})
    for temperature in sorted({row["temperature"] for row in rows}):
        kind = "greedy" if temperature == 0 else f"T = {temperature:g}"
        yield _line([f"{kind}: mean acceptance length (speed over S = 0)", *map(_size, contexts)])
        yield _line(["---"] * (len(contexts) + 1))
        found = {(row["draft_model"], row["context"]): row for row in rows if row["temperature"] == temperature}
        for name in dict.fromkeys(name for name, _ in found):
            cells = [_cell(found.get((name, context))) for context in contexts]
            yield _line([name, *cells])
        yield ""


def loss_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of loss by position."""
    ranges = sorted({(row["from"], row["to"]) for row in rows})
    yield _line(["loss at positions", *(f"{_size(begin)} to {_size(end)}" for begin, end in ranges)])
    yield _line(["---"] * (len(ranges) + 1))
    found = {(row["target"], row["texts"], (row["from"], row["to"])): row["loss"] for row in rows}
    for target, texts in dict.fromkeys((target, texts) for target, texts, _ in found):
        losses = (found.get((target, texts, each)) for each in ranges)
        yield _line([f"{target}, {texts}", *("" if loss is None else f"{loss:.2f}" for loss in losses)])


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    faster = row["decode_tokens_per_s"] / row["baseline_decode_tokens_per_s"]
    return f"{row['mean_acceptance_length']:.2f} ({faster:.2f})"


def _size(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens and tokens % 1024 == 0 else str(tokens)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables of a result file, and of the training where it is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="what bench.long_contexts wrote")
    parser.add_argument("--training", type=Path, help="JSON whose `position_loss` has rows of loss by position")
    options = parser.parse_args(arguments)
    print("\n".join(acceptance_tables(json.loads(options.result.read_text(encoding="utf-8"))["rows"])))
    if options.training is not None:
        print("\n".join(loss_table(json.loads(options.training.read_text(encoding="utf-8"))["position_loss"])))


if __name__ == "__main__":
    main()
