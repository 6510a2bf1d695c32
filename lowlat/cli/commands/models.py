"""`lowlat models`: published models that run, their sizes and draft models, and which of them fit this machine."""

import click

from lowlat.cli.collection import rare_collections
from lowlat.cli.console import format_bytes, print_json, print_table
from lowlat.cli.options import as_json

__all__ = ["command"]


@click.command("models")
@click.option("--markdown", is_flag=True, help="Print a table for a page, without this machine's memory.")
@as_json
@rare_collections()
def command(markdown: bool, json_output: bool) -> None:
    """List published models that run: sizes, draft models, and formats whose weights fit the GPU's free memory.

    Without a GPU it is this machine's, in which weights are expanded to float32, whatever their format.

    Other sizes of a listed family run, too; `lowlat inspect ORG/NAME` tells.
    """
    from lowlat.cli.reports.published import markdown as table
    from lowlat.cli.reports.published import models_report

    report = models_report()
    if json_output:
        print_json(report)
        return
    if markdown:
        click.echo(table(report))
        return
    free = report["free_bytes"]
    rows = [
        (
            each["model"],
            each["family"],
            format_bytes(each["bytes"]["stored"]),
            each["executor"],
            ", ".join(each["fits"]) or "none",
            ", ".join(each["draft_models"]),
        )
        for each in report["models"]
    ]
    known = "free memory is not known" if free is None else f"{format_bytes(free)} free on {report['device']}"
    if report["device"] == "cpu":
        known += ", where weights are expanded to float32"
    print_table(f"models: {known}", ("model", "family", "weights", "on GPUs", "fits as", "draft models"), rows)
    click.echo(f"families: {', '.join(report['families'])}")
    click.echo(f"quantised files, by quant_method: {', '.join(report['quant_methods'])}")
