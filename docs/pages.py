"""The pages of the site, by subject: whole READMEs, and sections of those that hold several subjects."""

from dataclasses import dataclass

__all__ = ["GROUPS", "PAGES", "Page", "Part"]

USING, TOOLS, EXECUTORS = "lowlat/USING.md", "lowlat/tools/README.md", "lowlat/executors/README.md"


@dataclass(frozen=True)
class Part:
    """A file, or some of its sections.

    file      relative to the checkout
    sections  titles of its second level; None: all of it. The text before the first section is "" by name
    """

    file: str
    sections: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Page:
    """One page.

    name   of its file, and of its address
    title  None: its first part's own
    parts  none: it comes from code
    """

    name: str
    title: str | None
    parts: tuple[Part, ...] = ()


def _page(name: str, title: str | None, file: str, *sections: str) -> Page:
    return Page(name, title, (Part(file, sections or None),))


GROUPS: dict[str, tuple[Page, ...]] = {
    "": (_page("start", None, "README.md"),),
    "Use": (
        Page(
            "choose",
            "Choosing a model and its draft model",
            (Part(USING, ("", "Models and commands", "What it runs")), Part("lowlat/models/README.md")),
        ),
        _page("speculators", None, "lowlat/speculators/README.md"),
        _page("specpv", None, "lowlat/speculators/SPECPV.md"),
        _page("embed", "In a process", USING, "In a process"),
        Page(
            "serve", "Serving", (Part(USING, ("From other processes", "Over HTTP", "Memory for many conversations")),)
        ),
        _page("http", None, "lowlat/serving/http/README.md"),
        _page("growing", None, "lowlat/serving/http/GROWING.md"),
        _page("tools", None, "lowlat/serving/http/TOOLS.md"),
        Page("sockets", None, (Part("ipc/README.md"), Part("ipc/WIRE.md"))),
        _page("several-models", None, "lowlat/serving/models/README.md"),
        _page("deploy", None, "lowlat/serving/deploy/README.md"),
        _page("structured", "Structured output", USING, "Structured output"),
        _page("sessions", None, "lowlat/SESSIONS.md"),
        _page("requests", None, "lowlat/engine/REQUESTS.md"),
        _page("gpus", "Several GPUs", EXECUTORS, "Several GPUs"),
        _page("quantise", "Weights of 8 and 4 bits", "lowlat/checkpoint/README.md"),
        _page("tune", "Tuning and profiling", TOOLS, "Tuning for a GPU", "Where the time goes"),
        _page("exactness", None, "lowlat/EXACTNESS.md"),
        _page("check", "Checking a pair", TOOLS, "", "Checking a pair"),
        _page("troubleshoot", None, "lowlat/TROUBLESHOOTING.md"),
    ),
    "How it works": (
        _page("tour", None, "lowlat/README.md"),
        _page("step", None, "lowlat/step/README.md"),
        _page("executors", "Executors", EXECUTORS, "", "Executors"),
        _page("engine", None, "lowlat/engine/README.md"),
        _page("sequence", None, "lowlat/sequence/README.md"),
        _page("graphs", None, "graphs/README.md"),
        _page("kernels", None, "kernels/README.md"),
        _page("tables", None, "kernels/tuning/tables/README.md"),
        *(
            _page(f"kernels-{name}", None, f"kernels/notes/{name}.md")
            for name in (
                *("attention", "bookkeeping", "collectives", "compiling", "decode-gemm", "experts", "flash-attention"),
                *("lowering", "many-slots", "plans", "prefill", "prefill-gemm", "recurrent", "router"),
            )
        ),
    ),
    "Reference": (Page("api", "API"), Page("commands", "Commands")),
    "Measurements": (
        _page("benchmarks", None, "bench/README.md"),
        *(
            _page(f"measured-{name}", None, f"bench/notes/{name}.md")
            for name in (
                *(
                    "decode-steps",
                    "limits",
                    "draft-lengths",
                    "formats",
                    "several-gpus",
                    "prompts",
                    "gpt-oss",
                    "gemma",
                    "hybrids",
                    "sessions",
                ),
                *("pairs-gpu", "long-contexts", "pairs-cpu", "grammars", "serving"),
            )
        ),
    ),
    "Project": (
        _page("changelog", None, "lowlat/CHANGELOG.md"),
        _page("contributing", None, "lowlat/CONTRIBUTING.md"),
        _page("training", None, "bench/training/README.md"),
        _page("demo", None, "lowlat/demo/README.md"),
    ),
}
PAGES = tuple(page for group in GROUPS.values() for page in group)
