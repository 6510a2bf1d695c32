"""`python -m docs OUT`: the site, as HTML; every warning, such as a link that leads nowhere, is an error."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from docs.assembly import Site
from docs.reference import write_api, write_commands

__all__ = ["build", "main"]

ROOT = Path(__file__).resolve().parents[1]


def build(out: Path, builder: str = "html") -> int:
    """Write the site to a folder; returns 0, or another number where something is wrong, which stderr says.

    builder  Sphinx's; "dummy" reads every page and resolves every link, and writes nothing

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
        status: int = build_main(["-q", "-W", "--keep-going", "-b", builder, *where, str(pages), str(out)])
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the site where the command line says."""
    parser = argparse.ArgumentParser(prog="python -m docs", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--check", action="store_true", help="read all pages and resolve all links, and write nothing")
    given = parser.parse_args(arguments)
    return build(given.out, "dummy" if given.check else "html")


if __name__ == "__main__":
    raise SystemExit(main())
