"""Sphinx's settings."""

from typing import Any

import lowlat
from docs.reference import reformatted

project = "lowlat"
author = "the lowlat authors"
release = version = lowlat.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["extra"]
html_theme = "furo"
html_title = f"lowlat {release}"
html_show_sphinx = html_copy_source = html_show_sourcelink = False
highlight_language = "text"
myst_heading_anchors = 4
# `source:` leads to a copy of a file of the checkout, next to the pages
myst_url_schemes: dict[str, Any] = {"http": None, "https": None, "mailto": None, "source": {"url": "{{path}}"}}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 100


def setup(app: Any) -> None:
    """Have docstrings reformatted as autodoc reads them."""

    def process(_app: Any, _what: str, _name: str, _thing: Any, _options: Any, lines: list[str]) -> None:
        lines[:] = reformatted(lines)

    app.connect("autodoc-process-docstring", process)
