"""`lowlat quantize`: a checkpoint of 8 or 4 bits of a plain one."""

from pathlib import Path
from typing import Literal

import click

from lowlat.cli.console import format_bytes, print_json
from lowlat.cli.options import as_json
from lowlat.cli.paths import MODEL, NEW_FOLDER

__all__ = ["command"]


@click.command("quantize")
@click.argument("model", type=MODEL)
@click.option("--format", "kind", type=click.Choice(["fp8", "int4"]), required=True, help="FP8 by row, or INT4.")
@click.option("--out", type=NEW_FOLDER, required=True, metavar="DIR", help="Where to write the new checkpoint.")
@click.option("--lm-head", is_flag=True, help="Round the LM head, too.")
@as_json
def command(model: Path, kind: Literal["fp8", "int4"], out: Path, lm_head: bool, json_output: bool) -> None:
    """Write MODEL with its linear layers rounded to nearest, as compressed-tensors stores them.

    Embeddings, norms and, without --lm-head, the LM head stay as they are. Activations are not quantised.
    """
    from lowlat.checkpoint.quantising import Quantiser
    from lowlat.cli.models import local_target
    from lowlat.tools.quantize import quantise_checkpoint

    found = quantise_checkpoint(local_target(model), out, Quantiser(kind, lm_head))
    if json_output:
        sizes = {"old_bytes": found.old_bytes, "new_bytes": found.new_bytes}
        print_json({"out": str(found.directory), "format": kind, "layers": found.layers, **sizes})
        return
    sizes_text = f"{format_bytes(found.old_bytes)} before, {format_bytes(found.new_bytes)} now"
    click.echo(f"{found.directory}: {found.layers} layers in {kind}, {sizes_text}")
