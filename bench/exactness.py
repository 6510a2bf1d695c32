"""This program prints a table of reports of `lowlat doctor --exactness --fidelity --out FILE`, with a row a pair.

python -m bench.exactness bench/results/h200/exactness.json
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["main", "table"]


def table(reports: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The rows of reports, in Markdown; cells are empty where `--exactness` or `--fidelity` was not asked for."""
    yield "| pair | GPU or processor | answers, all equal | drafts verified, accepted | KL of prompts | KL of steps |"
    yield "|---|---|---:|---:|---|---|"
    for each in reports:
        answers = _answers(each["exactness"]) if "exactness" in each else ("", "")
        kl = [_error(rows["kl"]) for rows in each["fidelity"]["rows"]] if "fidelity" in each else ("", "")
        pair = f"{each['target']}, {each['draft_model'] or 'its MTP layer'}, S = {each['num_speculative_tokens']}"
        yield f"| {' | '.join([pair, each['card'], *answers, *kl])} |"


def _answers(found: dict[str, Any]) -> tuple[str, str]:
    """The answers that were compared, and the drafts that were verified and accepted."""
    drafted, accepted, different = (
        sum(sweep[name] for sweep in found["sweeps"]) for name in ("drafted", "accepted", "different")
    )
    return f"{found['compared']}" + (f", {different} DIFFER" if different else ""), f"{drafted}, {accepted}"


def _error(found: dict[str, float]) -> str:
    ratio = f"{found['ratio']:.2f} x ({found['lower']:.2f} to {found['upper']:.2f})"
    return f"{found['lowlat']:.2g} nats, {ratio}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns 1 where a report does not hold."""
    parser = argparse.ArgumentParser(prog="python -m bench.exactness", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    reports = [each for file in parser.parse_args(arguments).files for each in json.loads(file.read_text())]
    for line in table(reports):
        print(line)
    return int(not all(each["holds"] for each in reports))


if __name__ == "__main__":
    raise SystemExit(main())
