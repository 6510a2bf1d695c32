"""One comparison: every case by lowlat and each other engine in pairs of runs (`pairs`); a file after every row.

    python -m bench.peers --geometry llama-8b --context 8192 --batch 1 -S 0,3 --pairs 6 --out peers.json
    python -m bench.peers --model DIR --draft-model DIR --gguf FILE --context 8192 -S 0 --out peers.json

A geometry's weights are random in every engine. With drafts its acceptance is imposed (`--accept-length`) where an
engine can; tokens are compared only where engines accept alike, steps always.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from bench.lib.subjects import DEMO, known_geometry, open_subject
from bench.peers.engine import Job
from bench.peers.engines import ENGINES
from bench.peers.gguf_file import FAMILIES, write_gguf
from bench.peers.pairs import OWN, compared, schedule
from bench.peers.results import Estimate, NotCompared, PeerResult, PeerRow
from bench.peers.worker import COMMAND
from lowlat.errors import ConfigError, LowlatError
from lowlat.models.target import OpenedTarget, open_target
from lowlat.tools.bench.geometry import random_target
from lowlat.tools.bench.results import Environment, read_struct, write_struct
from lowlat.tools.bench.scenarios import Case
from lowlat.tools.draft_model.random_models import write_draft_model

__all__ = ["main", "same_acceptance"]

SAME = 0.02  # a part by which accept lengths may differ where tokens are compared
ALL = "all"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the file; returns 1 where lowlat itself could not be measured."""
    options = _options(arguments)
    with tempfile.TemporaryDirectory(prefix="lowlat-peers-") as folder:
        scratch = options.scratch or Path(folder)
        try:
            jobs, environment = _prepare(options, scratch)
        except ConfigError as error:
            raise SystemExit(f"bench.peers: {error}") from error
        result = PeerResult(
            environment=environment,
            steps=options.steps,
            warm_up=options.warm_up,
            repeats=options.repeats,
            pairs=options.pairs,
            accept_length=options.accept_length,
            engines=tuple(options.engines),
        )
        runnable = [job for job in jobs if _can_run(job, result)]
        for job, against, pair in schedule(runnable, options.pairs):
            _measure(job, against, pair, result, scratch, options.limit_s)
            result.comparisons = compared(result.rows)
            write_struct(options.out, result)
    apart = same_acceptance(result.rows)
    result.not_compared += apart
    without = [(each.engine, each.case, "ms_per_token") for each in apart if each.case is not None]
    result.comparisons = compared(result.rows, without)
    write_struct(options.out, result)
    for line in table(result):
        print(line)
    return int(not any(row.engine == OWN for row in result.rows))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", help="random weights of a named shape")
    parser.add_argument("--model", type=Path, help="a target's directory; without either, the bundled one")
    parser.add_argument("--draft-model", type=Path, help="an EAGLE3 draft model's directory")
    parser.add_argument("--gguf", type=Path, help="the target for llama.cpp; one is written for a dense geometry")
    parser.add_argument("--prompts", type=Path, help="text or token ids; the bundled pair's own, else random tokens")
    parser.add_argument("--context", type=_numbers, default=(8192,), help="N,N: tokens of a prompt")
    parser.add_argument("--batch", type=_numbers, default=(1,), help="N,N: requests")
    parser.add_argument("-S", "--num-speculative-tokens", dest="depth", type=_numbers, default=(0,), help="N,N")
    parser.add_argument("--accept-length", type=float, help="tokens a step that are imposed with drafts")
    parser.add_argument("--engines", type=lambda text: text.split(","), default=list(ENGINES), help="A,B")
    parser.add_argument("--steps", type=int, default=128, help="timed steps of a repeat")
    parser.add_argument("--warm-up", type=int, default=16, help="steps before them")
    parser.add_argument("--repeats", type=int, default=3, help="of a case in one run")
    parser.add_argument("--pairs", type=int, default=4, help="runs of lowlat and of each other engine, a case")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="seconds for one case of one engine")
    parser.add_argument("--scratch", type=Path, help="keep what is written for engines here")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    unknown = [name for name in options.engines if name not in ENGINES]
    if unknown:
        parser.error(f"--engines: {', '.join(unknown)}; known: {', '.join(ENGINES)}")
    if min(options.steps, options.warm_up, options.repeats, options.pairs) < 1:
        parser.error("--steps, --warm-up, --repeats and --pairs want at least 1")
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _prepare(options: argparse.Namespace, scratch: Path) -> tuple[list[Job], Environment]:
    """The jobs, case by case, and lowlat's conditions; what engines need is written. Raises ConfigError."""
    scratch.mkdir(parents=True, exist_ok=True)
    drafts = max(options.depth) > 0
    target, draft = _pair(options, scratch, drafts)
    with open_subject(
        {"device": options.device},
        geometry=options.geometry,
        model=options.model,
        draft_model=draft if drafts else None,
        accept_length=options.accept_length if drafts else None,
        drafts=False,
        prompts=options.prompts,
    ) as subject:
        environment, choice, stream = subject.environment(), subject.choice().device, subject.prompts.stream
    if choice.type == "cuda" and choice.index:
        raise ConfigError(f"{choice}: engines take the first GPU that they see; choose it by CUDA_VISIBLE_DEVICES")
    prompts = scratch / "prompts.json" if stream else None
    if prompts is not None:
        prompts.write_bytes(msgspec.json.encode(stream))
    known = zlib.crc32(str(target.directory.resolve()).encode())
    gguf = options.gguf or _gguf(options, target, scratch / f"target-{known:08x}.gguf")
    cases = [Case(context, batch, depth) for depth in options.depth for context in options.context
             for batch in options.batch]  # fmt: skip
    jobs = [
        Job(
            engine=name,
            case=case,
            steps=options.steps,
            warm_up=options.warm_up,
            repeats=options.repeats,
            device=choice.type,
            dtype=target.config.dtype,
            vocab_size=target.config.vocab_size,
            directory=str(target.directory),
            draft_directory=None if draft is None else str(draft),
            geometry=options.geometry,
            gguf=None if gguf is None else str(gguf),
            prompts=None if prompts is None else str(prompts),
            accept_length=options.accept_length,
        )
        for case in cases
        for name in options.engines
    ]
    return jobs, environment


def _pair(options: argparse.Namespace, scratch: Path, drafts: bool) -> tuple[OpenedTarget, Path | None]:
    """The target and its draft model's directory; of a geometry, a config.json and a random draft model are written."""
    if options.geometry is None:
        bundled = DEMO / "head" if options.model is None else None
        return open_target(options.model or DEMO / "target"), options.draft_model or bundled
    geometry = known_geometry(options.geometry)
    target = random_target(geometry, scratch / options.geometry)
    if not drafts or options.draft_model is not None:
        return target, options.draft_model
    draft = scratch / f"{options.geometry}-draft-model"
    if not (draft / "config.json").is_file():  # written last
        write_draft_model(geometry, target.config, draft)
    return target, draft


def _gguf(options: argparse.Namespace, target: OpenedTarget, path: Path) -> Path | None:
    """The target for llama.cpp, written once where that is asked for, installed, and knows the family."""
    config = target.config
    if "llama.cpp" not in options.engines or ENGINES["llama.cpp"].available().reason:
        return None
    if config.family not in FAMILIES or config.experts is not None or config.attention.qkv_bias:
        return None
    return path if path.is_file() else write_gguf(target, path)


def _can_run(job: Job, result: PeerResult) -> bool:
    """Whether a job can be measured; if not the reason is added, of an engine that is not there once."""
    engine = ENGINES[job.engine]
    missing = engine.available().reason
    refused = missing or engine.refusal(job)
    if refused:
        entry = NotCompared(engine=job.engine, case=None if missing else job.case, figures=ALL, reason=refused)
        if entry not in result.not_compared:
            result.not_compared.append(entry)
    return not refused


def _measure(job: Job, against: str, pair: int, result: PeerResult, scratch: Path, limit_s: float) -> None:
    """Add a run's row, or the reason why there is none."""
    load = os.getloadavg()[0]
    try:
        row = _in_a_process(job, scratch, limit_s)
    except LowlatError as error:
        print(f"{job.engine}: {job.case.name}: {error}", file=sys.stderr, flush=True)
        entry = NotCompared(engine=job.engine, case=job.case, figures=ALL, reason=str(error))
        if entry not in result.not_compared:
            result.not_compared.append(entry)
        return
    result.rows.append(msgspec.structs.replace(row, against=against, pair=pair))
    result.load.append(round(load, 2))


def _in_a_process(job: Job, scratch: Path, limit_s: float) -> PeerRow:
    """The row that a process of its own measures. Raises LowlatError with its last words where it fails."""
    asked, out, log = (scratch / name for name in ("job.json", "row.json", f"{job.engine}.log"))
    asked.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    asked.write_bytes(msgspec.json.encode(job))
    command = [*COMMAND, str(asked), str(out)]
    print(f"{job.engine}: {job.case.name}", file=sys.stderr, flush=True)
    with log.open("wb") as said, _group(command, said.fileno()) as process:
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise LowlatError(f"not measured within {limit_s:g} s (--limit-s)") from None
    if code or not out.is_file():
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it said nothing"]
        raise LowlatError(f"ended with {code}: {lines[-1][:300]}")
    return read_struct(out, PeerRow)


@contextmanager
def _group(command: Sequence[str], log: int) -> Iterator["subprocess.Popen[bytes]"]:
    """A process in a group of its own, run from the checkout; what it left running is ended with it."""
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, stdout=log, stderr=log, cwd=root, start_new_session=True) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def same_acceptance(rows: Sequence[PeerRow]) -> list[NotCompared]:
    """Figures of tokens that cannot be compared, because an engine accepts another number of drafts than lowlat."""
    lengths: dict[tuple[Case, str], list[float]] = {}
    for row in rows:
        if row.accept_length is not None:
            lengths.setdefault((row.case, row.engine), []).append(row.accept_length)
    means = {key: sum(each) / len(each) for key, each in lengths.items()}
    found = []
    for (case, engine), length in means.items():
        own = means.get((case, OWN))
        if engine == OWN or own is None or abs(length - own) <= SAME * own:
            continue
        reason = f"it accepts {length:.2f} tokens a step, lowlat {own:.2f}: compare steps"
        found.append(NotCompared(engine=engine, case=case, figures="ms_per_token, tokens_per_s", reason=reason))
    return found


def table(result: PeerResult) -> Iterator[str]:
    """The comparisons as a table of Markdown, the runs as another, and what is missing below them."""

    def shown(each: Estimate, digits: int = 3) -> str:
        return f"{each.median:.{digits}f} ({each.lower:.{digits}f} to {each.upper:.{digits}f})"

    yield "| case | figure | pairs | lowlat | other | | other over lowlat |"
    yield "|---|---|---:|---|---|---|---|"
    for each in result.comparisons:
        own = f"{each.versions[OWN]}: {shown(each.lowlat)}"
        other = f"{each.engine} {each.versions[each.engine]} | {shown(each.other)}"
        yield f"| {each.case.name} | {each.figure} | {each.pairs} | {own} | {other} | {shown(each.ratio, 2)} |"
    yield ""
    yield "| case | engine | version | pair | step, ms p50 / p99 | token, ms | tokens/s | first token, ms | GPU, GB |"
    yield "|---|---|---|---|---:|---:|---:|---:|---:|"
    for row in result.rows:
        first = "-" if row.first_token_ms is None else f"{row.first_token_ms.p50:.1f}"
        taken = "-" if row.memory.device_bytes is None else f"{row.memory.device_bytes / 1e9:.1f}"
        step = f"{row.ms_per_step.p50:.3f} / {row.ms_per_step.p99:.3f}"
        pair = f"{row.against} {row.pair}" if row.against else "alone"
        cells = [row.case.name, row.engine, row.version, pair, step, f"{row.ms_per_token.p50:.3f}"]
        yield f"| {' | '.join([*cells, f'{row.tokens_per_s:.1f}', first, taken])} |"
    yield ""
    for missing in result.not_compared:
        where = missing.engine if missing.case is None else f"{missing.engine}, {missing.case.name}"
        yield f"- {where}: {missing.figures}: {missing.reason}"
