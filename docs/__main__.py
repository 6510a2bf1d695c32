"""`python -m docs OUT`: the site, as HTML; every warning, such as a link that leads nowhere, is an error."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from docs.assembly import Site
from docs.reference import write_api, write_commands

__all__ = ["build", "main"]

ROOT = Path(__file__).resolve().parents[1]


def build(out: Path) -> int:
    """Write the site to a folder; returns 0, or another number where something is wrong, which stderr says.

    Raises LostLinkError, and ImportError without the extra `docs`.
    """
    from sphinx.cmd.build import build_main

    with tempfile.TemporaryDirectory(prefix="lowlat-docs-") as scratch:
        pages = Path(scratch) / "pages"
        Site(ROOT).write(pages)
        write_api(pages)
        write_commands(pages)
        extra = f"html_extra_path={pages / 'extra'}"
        where = ["-c", str(Path(__file__).parent), "-d", str(Path(scratch) / "doctrees"), "-D", extra]
        status: int = build_main(["-q", "-W", "--keep-going", "-b", "html", *where, str(pages), str(out)])
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the site where the command line says."""
    parser = argparse.ArgumentParser(prog="python -m docs", description=__doc__)
    parser.add_argument("out", type=Path)
    return build(parser.parse_args(arguments).out)


if __name__ == "__main__":
    raise SystemExit(main())
