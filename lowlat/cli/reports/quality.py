"""`lowlat inspect quality`: two targets loaded next to each other, their figures on a text, and the table of them."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from lowlat.cli.console import print_table, progress_bar
from lowlat.cli.options import STORED
from lowlat.cli.running import load_runtime
from lowlat.tools.quality import OPTIONS, measure_quality, read_text

__all__ = ["print_quality", "run_quality"]


def run_quality(
    model: Path, against: Path | None, text: Path, max_tokens: int | None, options: dict[str, Any]
) -> dict[str, Any]:
    """The report as JSON values; `against` and `divergence` are None where nothing is compared.

    options   of `Runtime.load`
    Raises ConfigError, RequestError and LowlatError.
    """
    content = read_text(text)
    options = {"max_context": None, **options, **OPTIONS}
    plain = {name: value for name, value in options.items() if name not in STORED}
    if against is None and plain != options:
        against = model
    with ExitStack() as stack:
        target = stack.enter_context(load_runtime(model, None, **options))
        other = None if against is None else stack.enter_context(load_runtime(against, None, **plain))
        with progress_bar("predicting") as update:
            found = measure_quality(target, other, content, max_tokens=max_tokens, text_name=str(text), progress=update)
    report: dict[str, Any] = msgspec.to_builtins(found)
    report["target"]["model"] = str(model)
    if against is not None:
        report["against"]["model"] = str(against)
    return report


def print_quality(report: dict[str, Any]) -> None:
    """The tables of a report."""
    target, against, divergence = report["target"], report["against"], report["divergence"]
    columns = [("model", target), *([("against", against)] if against else [])]
    rows = [
        ["directory", *(each["model"] for _, each in columns)],
        ["quantised layers", *(", ".join(each["formats"]) or "none" for _, each in columns)],
        ["KV cache", *(each["kv_cache"] for _, each in columns)],
        ["activations", *(each["activations"] for _, each in columns)],
        ["compute dtype", *(each["dtype"] for _, each in columns)],
        ["log loss, nats a token", *(f"{each['mean_log_loss']:.4f}" for _, each in columns)],
        ["perplexity", *(f"{each['perplexity']:.3f}" for _, each in columns)],
    ]
    counts = f"{report['num_predicted']} tokens of {report['text']}, {report['num_windows']} windows"
    title = f"{counts} of at most {report['window_tokens']}, {report['device']} ({report['executor']} executor)"
    print_table(title, ("what", *(name for name, _ in columns)), rows)
    if divergence is not None:
        rows = [
            ["KL divergence by token, mean, nats", f"{divergence['mean_kl']:.5f}"],
            ["KL divergence, 99th percentile", f"{divergence['p99_kl']:.5f}"],
            ["KL divergence, largest", f"{divergence['max_kl']:.5f}"],
            ["the same likeliest token", f"{divergence['top1_agreement']:.2%}"],
            ["log loss added, nats a token", f"{divergence['log_loss_increase']:+.4f}"],
        ]
        print_table("next-token distributions: model from against", ("what", "found"), rows)
