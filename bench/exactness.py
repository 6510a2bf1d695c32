"""The table of reports that `lowlat doctor --exactness --fidelity --out FILE` wrote: a row a pair.

python -m bench.exactness bench/results/h200/exactness.json
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["main", "table"]


def table(reports: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The rows of a file's reports, in Markdown."""
    yield "| pair | GPU or processor | answers, all equal | drafts verified, accepted | KL of prompts | KL of steps |"
    yield "|---|---|---:|---:|---|---|"
    for each in reports:
        sweeps = each["exactness"]["sweeps"]
        drafted, accepted = (sum(sweep[name] for sweep in sweeps) for name in ("drafted", "accepted"))
        different = sum(sweep["different"] for sweep in sweeps)
        answers = f"{each['exactness']['compared']}" + (f", {different} DIFFER" if different else "")
        kl = [_error(rows["kl"]) for rows in each["fidelity"]["rows"]]
        pair = f"{each['target']}, {each['draft_model'] or 'its MTP layer'}, S = {each['num_speculative_tokens']}"
        yield f"| {' | '.join([pair, each['card'], answers, f'{drafted}, {accepted}', *kl])} |"


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
