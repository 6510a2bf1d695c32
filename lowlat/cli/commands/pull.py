"""`lowlat pull`: fetch a model, and a draft model for it, into the cache, so that a later start needs no network."""

from pathlib import Path
from typing import Any

import click

from lowlat.cli.console import format_bytes, print_json
from lowlat.cli.options import as_json
from lowlat.cli.paths import MODEL, check_model

__all__ = ["command"]


@click.command("pull")
@click.argument("model", type=MODEL)
@click.option("--draft-model", "--head", "head", type=MODEL, metavar="MODEL", help="A draft model to fetch with it.")
@as_json
def command(model: Path, head: Path | None, json_output: bool) -> None:
    """Fetch MODEL (ORG/NAME, or ORG/NAME@REVISION) into the Hugging Face cache, and print where it is.

    What is there already is not fetched again. What is read of a repository is its config, tokenizer and weights.
    """
    for one in (model, head):
        if one is not None:
            check_model(one)

    from lowlat.cli.models import local_draft_model, local_target

    target = local_target(model)
    found = {"model": _fetched(target)}
    if head is not None:
        found["draft_model"] = _fetched(local_draft_model(head, target))
    if json_output:
        print_json(found)
        return
    for each in found.values():
        click.echo(f"{each['directory']}  {format_bytes(each['bytes'])}")


def _fetched(directory: Path) -> dict[str, Any]:
    num_bytes = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    return {"directory": str(directory), "bytes": num_bytes}
