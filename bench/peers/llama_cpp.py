"""llama.cpp: its own `llama-bench` for one request, `llama-batched-bench` for several, on a GGUF of the same weights.

Both tell the time of many steps alone, so a sample is a mean; neither samples tokens, nor speculates.
Source: tools/llama-bench/README.md and tools/batched-bench/README.md of github.com/ggml-org/llama.cpp.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from bench.peers.engine import Found, Job, Mark, Measured
from lowlat.errors import LowlatError
from lowlat.tools.bench.measure import Samples

__all__ = ["LlamaCpp"]

ONE, SEVERAL = "llama-bench", "llama-batched-bench"


class LlamaCpp:
    """llama.cpp's benchmarks, as they are found on PATH."""

    name = "llama.cpp"

    def available(self) -> Found:
        """The build that is on PATH, as the benchmark's own help or version names it."""
        if shutil.which(ONE) is None:
            return Found("", f"not installed: no {ONE} on PATH")
        server = shutil.which("llama-cli") or shutil.which("llama-server")
        if server is None:
            return Found("unknown")
        done = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=60, check=False)
        found = re.search(r"version:\s*(\S+(?: \(\w+\))?)", done.stdout + done.stderr)
        return Found(found.group(1) if found else "unknown")

    def refusal(self, job: Job) -> str:
        """Why a case cannot be measured: speculation, no GGUF, or several requests without the other benchmark."""
        if job.depth:
            return f"{ONE} measures no speculation, and llama.cpp has no EAGLE3 checkpoint of this layout"
        if job.gguf is None:
            return "no GGUF of this model (--gguf FILE), and none is written for its family"
        if job.case.batch > 1 and shutil.which(SEVERAL) is None:
            return f"not installed: no {SEVERAL} on PATH"
        return ""

    def commands(self, job: Job) -> list[list[str]]:
        """The runs: of one request, the prompt and then the steps after it; of several, all repeats and one more.

        The additional one is for the log of `llama-batched-bench`, whose last lines are lost where it ends too soon.
        """
        model, context, steps, batch = ["-m", str(job.gguf)], job.case.context, job.steps, job.case.batch
        on_gpu = job.device.startswith("cuda")
        where = ["-ngl", "99"] if on_gpu else ["-ngl", "0", "-t", str(max(1, len(os.sched_getaffinity(0)) - 1))]
        if batch == 1:
            rest = ["-r", str(job.repeats), *where, "-fa", "1", "-o", "json"]
            prompt = ["-p", str(context), "-n", "0"]
            return [[ONE, *model, *each, *rest] for each in (prompt, ["-p", "0", "-n", str(steps), "-d", str(context)])]
        repeats = ",".join([str(batch)] * (job.repeats + 1))
        sizes = ["-c", str(batch * (context + steps)), "-npp", str(context), "-ntg", str(steps), "-npl", repeats]
        return [[SEVERAL, *model, *sizes, *where, "-fa", "on", "--output-format", "jsonl"]]

    def measure(self, job: Job, mark: Mark) -> Measured:
        """Run the benchmarks. Raises LowlatError where one fails or tells something else."""
        del mark  # the processes that hold the memory have ended
        shown = [_output(command) for command in self.commands(job)]
        settings = {"command": " ".join(self.commands(job)[-1][3:]), "dtype": "bfloat16"}
        if job.case.batch > 1:
            return Measured(self.read_several(job, shown[0]), settings, steps_a_sample=job.steps)
        settings["build"] = str(_parsed(shown[0]).get("build_commit", "unknown"))
        return Measured(self.read_one(job, *shown), settings, steps_a_sample=job.steps)

    def read_one(self, job: Job, prompt: str, steps: str) -> list[Samples]:
        """Repeats of `llama-bench`'s two outputs."""
        first, later = (_field(_parsed(text), "samples_ns") for text in (prompt, steps))
        return [_samples(job, 1e-6 * one, 1e-6 * other) for one, other in zip(first, later, strict=True)]

    def read_several(self, job: Job, text: str) -> list[Samples]:
        """Repeats of `llama-batched-bench`."""
        rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        if len(rows) < job.repeats:
            raise LowlatError(f"{SEVERAL} printed {len(rows)} rows, {job.repeats} are needed: {text[-200:]!r}")
        return [_samples(job, 1e3 * _field(row, "t_pp"), 1e3 * _field(row, "t_tg")) for row in rows[: job.repeats]]


def _samples(job: Job, first_ms: float, steps_ms: float) -> Samples:
    batch, samples = job.case.batch, Samples(first_ms=[first_ms])
    samples.add(steps_ms / job.steps, [{str(slot): 1 for slot in range(batch)}], _lengths(job))
    return samples


def _lengths(job: Job) -> dict[str, int]:
    return {str(slot): job.case.context + job.steps // 2 for slot in range(job.case.batch)}


def _parsed(text: str) -> dict[str, Any]:
    """The one row of `llama-bench`."""
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise LowlatError(f"{ONE} printed no JSON: {text[-200:]!r}") from error
    if not isinstance(rows, list) or len(rows) != 1 or not isinstance(rows[0], dict):
        raise LowlatError(f"{ONE} printed {text[:200]!r} in place of one row")
    return dict(rows[0])


def _field(row: dict[str, Any], name: str) -> Any:
    if name not in row:
        raise LowlatError(f"llama.cpp's row has no {name!r}: {', '.join(row)}")
    return row[name]


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LowlatError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    return done.stdout
