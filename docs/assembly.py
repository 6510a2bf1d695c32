"""Pages joined from READMEs: sections are cut, titles set, and every link led to its place on the site.

A link to a README, or to a section of one, leads to the page that holds it; one to another file of the checkout to a
copy of that file, as text; one to a folder to its README or a list of its files. A link that leads nowhere is an error.
"""

import html
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from docs.drawing import drawn
from docs.pages import GROUPS, PAGES, Page, Part

__all__ = ["LostLinkError", "Site", "anchors_of", "outside_code", "sections_of", "tracked_files", "unused_sections"]

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
HEADING = re.compile(r"^(#{1,6}) (.+)$", re.MULTILINE)
DRAWING = re.compile(r"^```mermaid\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
SHOWN_AS_THEY_ARE = {".svg", ".png", ".json", ".html"}
START = GROUPS[""][0]
SOURCE = "source"  # the scheme of links to copies, and their folder


class LostLinkError(ValueError):
    """A link of a page leads nowhere."""


def tracked_files(root: Path) -> list[str]:
    """Files of the checkout that git knows or would add; links among them are left out."""
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    files = (name for name in done.stdout.splitlines() if (root / name).is_file())
    return sorted(name for name in files if not (root / name).is_symlink())


def outside_code(text: str) -> Iterator[tuple[str, bool]]:
    """The text in pieces, each with whether it stands outside blocks of code."""
    for number, piece in enumerate(FENCE.split(text)):
        yield piece, number % 2 == 0


def slug(title: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


def headings(text: str) -> list[tuple[int, str]]:
    """Level and title of each heading, without those in code."""
    return [(len(m[1]), m[2]) for piece, is_text in outside_code(text) if is_text for m in HEADING.finditer(piece)]


def anchors_of(text: str) -> list[str]:
    """The anchors of a page's headings; a repeated one gets a number."""
    found: list[str] = []
    for _, title in headings(text):
        name, number = slug(title), 0
        while (name if not number else f"{name}-{number}") in found:
            number += 1
        found.append(name if not number else f"{name}-{number}")
    return found


def sections_of(text: str) -> dict[str, str]:
    """The sections of the second level by title, headings included; under "" what stands before the first."""
    found, title = {"": ""}, ""
    for piece, is_text in outside_code(text):
        for line in piece.splitlines(keepends=True) if is_text else [piece]:
            if is_text and line.startswith("## "):
                title = line[3:].strip()
                found[title] = ""
            found[title] += line
    return found


def _lowered(text: str) -> str:
    """A text whose headings are a level lower."""
    pieces = ((HEADING.sub(r"#\1 \2", piece) if is_text else piece) for piece, is_text in outside_code(text))
    return "".join(pieces)


@dataclass
class Site:
    """The site of a checkout.

    root    the checkout
    copied  files that pages link to, which go with them
    images  files that pages show
    listed  folders that pages link to
    """

    root: Path
    copied: set[str] = field(default_factory=set)
    images: set[str] = field(default_factory=set)
    listed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.files = tracked_files(self.root)
        self._known = set(self.files)
        self._folders = {str(parent) for name in self.files for parent in PurePosixPath(name).parents}
        self._texts = {part.file: self.text(part.file) for page in PAGES for part in page.parts}

    def text(self, file: str) -> str:
        """A page of the checkout. Raises LostLinkError where there is none."""
        if file not in self._known:
            raise LostLinkError(f"{file}: no such page")
        return (self.root / file).read_text(encoding="utf-8")

    def parts_of(self, part: Part) -> str:
        """The text of a part, its own title without. Raises LostLinkError for a section that is not there."""
        sections = sections_of(self._texts[part.file])
        missing = set(part.sections or ()) - set(sections)
        if missing:
            raise LostLinkError(f"{part.file}: has no section {', '.join(sorted(missing))}")
        chosen = sections.values() if part.sections is None else [sections[name] for name in part.sections]
        return re.sub(r"\A# .+\n", "", "".join(chosen))

    def title(self, page: Page) -> str:
        """A page's title."""
        if page.title is not None:
            return page.title
        level, title = headings(self._texts[page.parts[0].file])[0]
        if level != 1:
            raise LostLinkError(f"{page.parts[0].file}: begins with no title")
        return title

    def markdown(self, page: Page) -> str:
        """A page from its parts; one section alone has the page's title in place of its own."""
        body = ""
        for number, part in enumerate(page.parts):
            text = self.parts_of(part)
            if part.sections is not None and len(part.sections) == 1 == len(page.parts):
                text = re.sub(r"\A## .+\n", "", text)
            elif number and part.sections is None:  # a whole file after the first: all headings a level lower
                text = "\n" + _lowered(f"{self._texts[part.file].splitlines()[0]}\n{text}")
            body += self._led(text, part.file)
        return f"# {self.title(page)}\n{body}"

    def write(self, folder: Path) -> None:
        """Write the pages of READMEs, the list of all, and copies of files that they link to."""
        folder.mkdir(parents=True, exist_ok=True)
        for page in PAGES:
            if page.parts and page is not START:
                text = self._with_drawings(self.markdown(page), page.name, folder / "images")
                (folder / f"{page.name}.md").write_text(text, encoding="utf-8")
        (folder / "index.md").write_text(self._index(), encoding="utf-8")
        copies = [(name, folder / "extra" / self._copy_of(name)) for name in self.copied]
        for name, place in [*copies, *((name, folder / "images" / name) for name in self.images)]:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.root / name, place)
        for name in sorted(self.listed):
            place = folder / "extra" / SOURCE / name / "index.html"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(self._listing(name), encoding="utf-8")

    def _with_drawings(self, text: str, name: str, folder: Path) -> str:
        """A page whose flowcharts are pictures, which are written into a folder."""

        def shown(match: re.Match[str]) -> str:
            file = f"{name}-{match.start()}.svg"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(drawn(match[1]), encoding="utf-8")
            return f"![flowchart](images/{file})\n"

        return DRAWING.sub(shown, text)

    def _index(self) -> str:
        """The start page is the index; a tree of all pages stands at its end."""
        trees = []
        for caption, pages in GROUPS.items():
            if names := [page.name for page in pages if page is not START]:
                lines = "\n".join(names)
                trees.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```")
        return "\n\n".join([self.markdown(START), *trees]) + "\n"

    def _led(self, text: str, file: str) -> str:
        return "".join(
            LINK.sub(lambda match: self._link(match, file), piece) if is_text else piece
            for piece, is_text in outside_code(text)
        )

    def _link(self, match: re.Match[str], file: str) -> str:
        bang, label, target = match.groups()
        shown = self._led(label, file) if "](" in label else label
        return f"{bang}[{shown}]({self.target(target, file, is_image=bool(bang))})"

    def target(self, target: str, file: str, *, is_image: bool = False) -> str:
        """Where a link of a file leads on the site. Raises LostLinkError."""
        if "://" in target or target.startswith("mailto:"):
            return target
        path, _, anchor = target.partition("#")
        name = os.path.normpath(os.path.join(os.path.dirname(file), path)) if path else file
        if name in self._folders and f"{name}/README.md" in self._known:
            name = f"{name}/README.md"
        if name in self._texts:
            return self._place(name, anchor, file)
        if name in self._known and is_image:
            self.images.add(name)
            return f"images/{name}"
        if name in self._known:
            self.copied.add(name)
            return f"{SOURCE}:{self._copy_of(name)}"
        if name in self._folders:
            self.listed.add(name)
            return f"{SOURCE}:{SOURCE}/{name}/index.html"
        raise LostLinkError(f"{file}: {target} leads nowhere")

    def _place(self, name: str, anchor: str, file: str) -> str:
        """The page, and the place on it, of a README's section."""
        if anchor and anchor not in anchors_of(self._texts[name]):
            raise LostLinkError(f"{file}: {name} has no heading #{anchor}")
        holding = [(page, part) for page in PAGES for part in page.parts if part.file == name]
        page, part = holding[0]
        if anchor:
            page, part = next(
                (each, part) for each, part in holding if anchor in anchors_of(self._section_text(part, name))
            )
            lone = part.sections is not None and len(part.sections) == 1 == len(page.parts)
            if anchor in (slug(part.sections[0]) if lone and part.sections else "", anchors_of(self._texts[name])[0]):
                anchor = ""
        address = "index" if page is START else page.name
        return f"{address}.md#{anchor}" if anchor else f"{address}.md"

    def _section_text(self, part: Part, name: str) -> str:
        sections = sections_of(self._texts[name])
        return "".join(sections[each] for each in (sections if part.sections is None else part.sections))

    def _copy_of(self, name: str) -> str:
        suffix = PurePosixPath(name).suffix
        return f"{SOURCE}/{name}" + ("" if suffix in SHOWN_AS_THEY_ARE else ".txt")

    def _listing(self, folder: str) -> str:
        """A folder's files: those that pages link to lead to their copies."""
        rows = []
        for name in self.files:
            if name.startswith(f"{folder}/"):
                shown = html.escape(name.removeprefix(f"{folder}/"))
                copy = html.escape(os.path.relpath(self._copy_of(name), f"{SOURCE}/{folder}"))
                rows.append(f'<li><a href="{copy}">{shown}</a></li>' if name in self.copied else f"<li>{shown}</li>")
        return f"<!doctype html><meta charset=utf-8><title>{folder}</title><h1>{folder}</h1><ul>{''.join(rows)}</ul>\n"


def unused_sections(site: Site, pages: Sequence[Page] = PAGES) -> list[str]:
    """Sections of files that are taken in parts, and stand on no page or on two."""
    found = []
    taken: dict[str, list[str]] = {}
    for page in pages:
        for part in page.parts:
            sections = list(sections_of(site.text(part.file)))
            taken.setdefault(part.file, []).extend(sections if part.sections is None else part.sections)
    for file, names in taken.items():
        for name in sections_of(site.text(file)):
            if names.count(name) != 1:
                found.append(f"{file}: section {name!r} stands on {names.count(name)} pages")
    return found
