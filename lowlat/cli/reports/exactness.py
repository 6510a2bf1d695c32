"""This module runs `lowlat doctor --exactness` and `--fidelity`, prints a line for each sweep, and writes reports."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from lowlat.checkpoint.files import read_json
from lowlat.cli.options import bundled
from lowlat.cli.running import chat_ids, load_runtime
from lowlat.errors import ConfigError
from lowlat.options.method_options import AUTO_METHOD
from lowlat.options.model_names import display_name
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.methods import settled
from lowlat.text import TextCodec
from lowlat.tools.bench.machine import changed_commit, driver, processor
from lowlat.tools.exactness import Exactness, Fidelity, Rows, Sweep, measure_exactness, measure_fidelity

__all__ = ["Proof", "print_rows", "print_sweep"]

MAX_REPORTS = 64 << 20


class Proof:
    """The checks of one pair, on the same prompts.

    draft_model  None: the target's own MTP layer
    depth        the longest draft length
    chat         texts are messages of the target's chat template
    out          a file of reports to which `write` adds this one; it is read first, so a wrong file is refused at once
    Raises ConfigError and LowlatError as `measure_exactness` does.
    """

    def __init__(
        self,
        target: Path,
        draft_model: Path | None,
        prompts: Sequence[str | list[int]],
        depth: int,
        *,
        max_tokens: int,
        chat: bool,
        device: str,
        out: Path | None = None,
    ) -> None:
        self._out, self._reports = out, _reports(out) if out is not None and out.exists() else []
        speculative = SpeculativeConfig(model=draft_model, method=AUTO_METHOD, num_speculative_tokens=depth)
        if chat:
            codec = TextCodec.load(target)
            prompts = [chat_ids(codec, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        self._pair = (target, settled(speculative, target), prompts)
        self._options: dict[str, Any] = {"max_tokens": max_tokens, "load": load_runtime, "device": device}
        self._names = {"target": _name(target), "draft_model": draft_model and _name(draft_model)}
        self.exactness: Exactness | None = None
        self.fidelity: Fidelity | None = None

    def check_exactness(self, *, shown: bool) -> None:
        """Compare answers with plain decoding; `shown` prints each sweep and the verdict."""
        self.exactness = measure_exactness(*self._pair, report=print_sweep if shown else None, **self._options)
        if shown:
            click.echo(self.exactness.verdict)

    def check_fidelity(self, *, shown: bool) -> None:
        """Compare distributions with those of transformers; `shown` prints the rows and the verdict."""
        self.fidelity = measure_fidelity(*self._pair, report=print_rows if shown else None, **self._options)
        if shown:
            click.echo(self.fidelity.verdict)

    @property
    def holds(self) -> bool:
        """Whether all that was checked holds."""
        return (self.exactness is None or self.exactness.exact) and (self.fidelity is None or self.fidelity.faithful)

    def to_dict(self) -> dict[str, Any]:
        """The reports and one verdict, as JSON values."""
        found = {
            name: each.to_dict()
            for name, each in (("exactness", self.exactness), ("fidelity", self.fidelity))
            if each is not None
        }
        return {**found, "verdict": "; ".join(each["verdict"] for each in found.values())}

    def write(self, environment: dict[str, Any]) -> None:
        """Add this pair's report to the file, in place of an earlier one of the same pair.

        environment  of the machine, as `lowlat doctor --json` has it
        Raises ConfigError where the file cannot be written.
        """
        if self._out is None:
            return
        _, speculative, prompts = self._pair
        devices = environment["gpu"]["devices"]
        entry = {
            **self._names,
            "num_prompts": len(prompts),
            "max_tokens": self._options["max_tokens"],
            "num_speculative_tokens": speculative.num_speculative_tokens,
            "card": devices[0]["name"] if devices else processor(),
            "driver": driver() if devices else "",
            "commit": changed_commit(),
            "lowlat": environment["versions"]["lowlat"],
            "torch": environment["versions"]["torch"],
            **self.to_dict(),
            "holds": self.holds,
        }
        kept = [each for each in self._reports if any(each.get(name) != entry[name] for name in self._names)]
        try:
            self._out.write_text(json.dumps([*kept, entry], indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{self._out}: cannot be written: {error.strerror}") from error


def _name(directory: Path) -> str:
    """A model's name; of the bundled ones with their folders."""
    demo = bundled("")
    return f"lowlat/demo/{directory.relative_to(demo)}" if directory.is_relative_to(demo) else display_name(directory)


def _reports(path: Path) -> list[dict[str, Any]]:
    found = read_json(path, MAX_REPORTS)
    if not isinstance(found, list) or not all(isinstance(each, dict) and "target" in each for each in found):
        raise ConfigError(f"{path}: is no file of reports; name another after --out")
    return found


def print_sweep(sweep: Sweep) -> None:
    """One line: how many answers were compared, and how many differ."""
    if sweep.skipped is not None:
        click.echo(f"{sweep.name}: not run: {sweep.skipped}")
        return
    drafts = f", {sweep.accepted} of {sweep.drafted} drafts accepted" if sweep.drafted else ""
    cached = f", {sweep.cached_tokens} tokens of prompts from the cache" if sweep.cached_tokens else ""
    equal = "all equal" if not sweep.different else f"{sweep.different} DIFFER"
    click.echo(f"{sweep.name}: {sweep.requests} answers, {sweep.tokens} tokens{drafts}{cached}: {equal}")


def print_rows(rows: Rows) -> None:
    """One line: both errors from float32, next to those of transformers."""
    errors = (("KL", rows.kl), ("error of logprobs", rows.nll_error))
    texts = (
        f"{name} {found.lowlat:.3g} nats, transformers {found.transformers:.3g}: {found.ratio:.2f} x "
        f"({found.lower:.2f} to {found.upper:.2f})"
        for name, found in errors
    )
    click.echo(f"fidelity of {rows.name}: {rows.positions} positions, {'; '.join(texts)}")
