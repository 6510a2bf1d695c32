"""The site: pages are the READMEs, joined by subject, with an API reference from docstrings.

    python -m docs OUT

`pages` says which page holds what, `assembly` joins them and leads their links, `reference` writes the pages that come
from code, and `conf` sets Sphinx up. Nothing is written twice: a page of the site is a README, or sections of one.
"""
