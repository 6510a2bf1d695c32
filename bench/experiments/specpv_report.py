"""Tables in Markdown of what `bench.experiments.specpv` and its `agreement` have written of lossy SpecPV.

    python -m bench.experiments.specpv_report specpv.json --agreement agreement.json agreement_long.json

The first is a line for each model, number of requests and context, and has full attention next to SpecPV's default
budget. The second is a line for each pair, context and budget; budgets that never left anything out are not in it.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["agreement_table", "figures_table", "main"]

CASE = ("model", "batch", "context")


def figures_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of times and memory, with columns for every draft length."""
    depths = sorted({row["num_speculative_tokens"] for row in rows})
    found = {(*(row[key] for key in CASE), row["num_speculative_tokens"], row["attention"]): row for row in rows}
    titles = [f"S = {depth}: ms a step | tokens/s | gain" for depth in depths]
    yield f"| model, requests x context | {' | '.join(titles)} | ms a refresh | KV + summaries, MiB |"
    yield "|---" * (3 + 3 * len(depths)) + "|"
    for case in dict.fromkeys(tuple(row[key] for key in CASE) for row in rows):
        pairs = [tuple(found[*case, depth, kind] for kind in ("full", "partial")) for depth in depths]
        cells = [cell for full, partial in pairs for cell in _beside(full, partial)]
        refreshes = " / ".join(f"{partial['ms_a_refresh']:.1f}" for _, partial in pairs)
        last = pairs[-1][1]
        model, batch, context = case
        memory = f"{last['kv_cache_mib']:.0f} + {last['key_summary_mib']:.0f}"
        yield f"| {model}, {batch} x {context // 1024}K | {' | '.join(cells)} | {refreshes} | {memory} |"


def agreement_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of tokens and distributions, of rows that had partial steps."""
    titles = ["pair", "context", "positions listed", "equal by place", "first other token of each text"]
    titles += ["same choice", "KL mean", "KL p99", "texts that loop"]
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for row in rows:
        if row["partial_steps"]:
            firsts = ", ".join("none" if first is None else str(first) for first in row["first_difference"])
            where = f"{row['pair']} | {row['context']} | {row['listed_positions']}"
            tokens = f"{row['equal_share']:.2f} | {firsts}"
            likeness = f"{row['same_choice']:.3f} | {row['mean_kl']:.2g} | {row['p99_kl']:.2g}"
            yield f"| {where} | {tokens} | {likeness} | {row['looping']} of {row['texts']} |"


def _beside(full: Mapping[str, Any], partial: Mapping[str, Any]) -> list[str]:
    """The cells of a draft length: times and speeds of both, and by what factor SpecPV is faster."""
    times = f"{full['ms_p50']:.2f} / {partial['ms_p50']:.2f}"
    speeds = f"{full['tokens_per_s']:.0f} / {partial['tokens_per_s']:.0f}"
    return [times, speeds, f"{partial['tokens_per_s_of_full']:.2f}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of a result file, and of those of agreement that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, help="what bench.experiments.specpv wrote, of one budget")
    parser.add_argument("--agreement", type=Path, nargs="+", default=[], help="what its agreement wrote")
    options = parser.parse_args(arguments)
    print("\n".join(figures_table(json.loads(options.figures.read_text(encoding="utf-8")))))
    results = [json.loads(file.read_text(encoding="utf-8")) for file in options.agreement]
    if results:
        print("\n".join(["", *agreement_table([row for each in results for row in each["rows"]])]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
