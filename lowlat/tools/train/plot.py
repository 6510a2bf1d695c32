"""Draw the loss of training runs over the tokens they saw.

    python -m lowlat.tools.train.plot --out loss.png "target=DIR/loss.json" "head=DIR/loss.json"

Each file holds a `log` of entries with `tokens` and `loss`, as the training commands write it. Beside the picture
the numbers are kept, thinned, as JSON of the same name.
"""

import argparse
import json
from pathlib import Path
from typing import Any

__all__ = ["thin"]


def thin(log: list[dict[str, Any]], limit: int = 60) -> list[dict[str, Any]]:
    """Return at most `limit` entries of step, tokens and loss, each the mean of a run of entries by steps covered."""
    size = -(-len(log) // limit)
    begins = range(0, max(1, len(log) - size + 1), size)  # what is left over joins the last run
    thinned = []
    for begin in begins:
        end = len(log) if begin == begins[-1] else begin + size
        group, total, covered = log[begin:end], 0.0, 0
        previous = log[begin - 1]["step"] if begin else 0
        for entry in group:
            total += entry["loss"] * (entry["step"] - previous)
            covered += entry["step"] - previous
            previous = entry["step"]
        last = group[-1]
        thinned.append({"step": last["step"], "tokens": last["tokens"], "loss": round(total / max(1, covered), 4)})
    return thinned


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(description="Draw the loss of training runs.")
    parser.add_argument("runs", nargs="+", help="NAME=FILE, a title and a loss.json")
    parser.add_argument("--out", required=True, help="picture to write; the numbers go beside it as .json")
    arguments = parser.parse_args()
    logs = {}
    for run in arguments.runs:
        name, _, path = run.partition("=")
        logs[name] = thin(json.loads(Path(path).read_text(encoding="utf-8"))["log"])
    figure, axes = pyplot.subplots(1, len(logs), figsize=(4 * len(logs), 3), constrained_layout=True, squeeze=False)
    for axis, (name, log) in zip(axes[0], logs.items(), strict=True):
        axis.plot([entry["tokens"] / 1e6 for entry in log], [entry["loss"] for entry in log], linewidth=1)
        axis.set(title=name, xlabel="million tokens", ylabel="loss (nats)")
        axis.set_ylim(top=min(axis.get_ylim()[1], 1.6 * log[len(log) // 10]["loss"]))
        axis.grid(alpha=0.3)
    figure.savefig(arguments.out, dpi=90)
    Path(arguments.out).with_suffix(".json").write_text(json.dumps(logs) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
