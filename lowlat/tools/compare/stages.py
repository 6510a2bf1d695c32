"""Stage by stage against another implementation: what lowlat computed, how far it lies from what was expected.

A recording holds the tokens of one greedy request and every stage's rows: the residual streams of all tokens,
the final norm and the logits of the decoded ones, and for each step with drafts the draft model's stages. It is taken
from a real runtime by a hook, so it says what decoding did. This module knows no other implementation.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lowlat.errors import ConfigError
from lowlat.host.runtime import Runtime
from lowlat.models.target import read_model_config
from lowlat.options.config import SpeculativeConfig
from lowlat.options.request import SamplingParams
from lowlat.program.program import Op

__all__ = ["Recording", "StageDifference", "common_rows", "differences", "load_recording", "record", "save_recording"]

FILE = "recording.safetensors"
TOP_K = 10
ROUNDING = 1e-12
LEVEL_STAGES = {"residual.middle": "attention", "residual.out": "ffn", "logits": "logits"}


@dataclass(frozen=True)
class Recording:
    """One request's stages.

    tokens         prompt and completion
    num_prompt     tokens of the prompt
    positions      positions of the features from which drafts were made, one a step
    drafts         [steps][S] the drafted tokens
    stages         stage -> rows in float32, in order of computation: "target.residual.b" [n - 1, N];
                   "target.final_norm", "target.logits" of the completion's rows; "head.fc" and, for each draft
                   level k, "head.k.attention", "head.k.ffn", "head.k.logits", one row a step
    """

    tokens: tuple[int, ...]
    num_prompt: int
    positions: tuple[int, ...]
    drafts: tuple[tuple[int, ...], ...]
    stages: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class StageDifference:
    """How far one stage lies from what was expected; differences are absolute, the cosine is the worst row's.

    `top_k_overlap` is the share of the expected ten likeliest ids found among the ten likeliest, for logits.
    """

    stage: str
    num_rows: int
    mean_difference: float
    max_difference: float
    cosine: float
    top_k_overlap: float | None

    def reaches(self, min_cosine: float) -> bool:
        """Whether the cosine is large enough, up to what rounding takes from that of equal rows."""
        return self.cosine >= min_cosine - ROUNDING

    def to_dict(self) -> dict[str, Any]:
        """As JSON; None for figures that are not finite."""
        fields = asdict(self).items()
        return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in fields}


class _Recorder:
    """The hook: copies the rows of the only request that each program has just computed."""

    def __init__(self, num_prompt: int) -> None:
        self.num_prompt = num_prompt
        self.rows: dict[str, list[torch.Tensor]] = {}
        self.positions: list[int] = []
        self.drafts: list[tuple[int, ...]] = []
        self._buffers: dict[str, torch.Tensor] = {}
        self._prefilled: dict[str, int] = {}

    def __call__(self, op: Op, arguments: Mapping[str, torch.Tensor]) -> None:
        for argument, name in op.writes.items():
            if name.startswith("prefill.residual."):
                self._take_chunk(name.removeprefix("prefill."), arguments[argument])
            self._buffers[name] = arguments[argument]
        if op.kind == "publish":
            self._take_step(arguments)
        elif op.kind == "tree_masks" and int(arguments["draft_live"][0]):
            self._take_drafts()

    def _take_chunk(self, name: str, rows: torch.Tensor) -> None:
        if name.rpartition(".")[2].isdigit():
            left = self.num_prompt - self._prefilled.get(name, 0)
            self._add(f"target.{name}", rows[: max(left, 0)])
            self._prefilled[name] = self._prefilled.get(name, 0) + rows.shape[0]

    def _take_step(self, arguments: Mapping[str, torch.Tensor]) -> None:
        count = int(arguments["commit_lens"][0])
        nodes = arguments["accepted_nodes"][0, :count].long()
        for name, rows in list(self._buffers.items()):
            prefix, _, boundary = name.rpartition(".")
            if prefix == "residual" and boundary.isdigit():
                self._add(f"target.{name}", rows[nodes])
            elif name in ("target.final", "target.logits"):
                self._add(name.replace("final", "final_norm"), rows[nodes])

    def _take_drafts(self) -> None:
        """The draft model's rows behind the last token committed; behind a prompt its feature comes out of prefill."""
        count = int(self._buffers["commit_lens"][0])
        feature = self._buffers.get("head.hidden", self._buffers["prefilled_feature"])
        self.positions.append(int(self._buffers["draft_lens"][0]) - 2)
        self.drafts.append(tuple(self._buffers["draft_nodes"][0, 1:].tolist()))
        self._add("head.fc", feature[count - 1 : count])
        for level in range(len(self.drafts[-1])):
            for name, stage in LEVEL_STAGES.items():
                self._add(f"head.{level}.{stage}", self._buffers[f"draft.{level}.{name}"][:1])

    def _add(self, stage: str, rows: torch.Tensor) -> None:
        self.rows.setdefault(stage, []).append(rows.float().cpu().clone())


def record(
    target: str | Path,
    head: str | Path | None,
    prompt: Sequence[int] | str,
    *,
    num_tokens: int = 16,
    num_speculative_tokens: int = 3,
    dtype: str = "float32",
    device: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Recording:
    """Decode `num_tokens` greedy tokens with lowlat and record every stage.

    Raises ConfigError for directories that cannot be used, RequestError for a prompt that does not fit.
    """
    speculative = None
    if head is not None:
        speculative = SpeculativeConfig(model=head, num_speculative_tokens=num_speculative_tokens, strict=True)
    # every buffer is wanted, also those that kernels keep to themselves
    options: dict[str, Any] = {"max_batch": 1, "dtype": dtype, "device": device, "executor": "reference"}
    options["prefix_reuse"] = False
    context = _context(target, prompt, num_tokens)
    with Runtime.load(target, speculative, progress=progress, max_context=context, **options) as runtime:
        tokens = runtime.codec.encode(prompt) if isinstance(prompt, str) and runtime.codec else prompt
        recorder = _Recorder(len(tokens))
        runtime.executor.set_hook(recorder)
        runtime.submit(tokens, SamplingParams(max_tokens=num_tokens, ignore_eos=True))
        completion: list[int] = []
        while runtime.busy:
            completion += [token for output in runtime.step() for token in output.token_ids]
    stages = {name: torch.cat(rows) for name, rows in recorder.rows.items()}
    everything = (*(int(token) for token in tokens), *completion)
    return Recording(everything, len(tokens), tuple(recorder.positions), tuple(recorder.drafts), stages)


def _context(target: str | Path, prompt: Sequence[int] | str, num_tokens: int) -> int:
    """A context that holds the prompt, whatever its tokens; never more than the model has."""
    longest = len(prompt.encode()) + 8 if isinstance(prompt, str) else len(prompt)
    return max(2, min(longest + num_tokens, read_model_config(target).max_position))


def common_rows(found: Recording, expected: Recording) -> tuple[Recording, Recording]:
    """Both cut to the rows that rest on equal tokens. Raises ConfigError where even the prompts differ."""
    if found.tokens[: found.num_prompt] != expected.tokens[: expected.num_prompt]:
        raise ConfigError("the recordings begin with different prompts; give the prompt of the saved one")
    pairs = zip(found.tokens, expected.tokens, strict=False)
    shared = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(found.tokens), len(expected.tokens)))
    pairs_of_drafts = zip(found.drafts, expected.drafts, found.positions, expected.positions, strict=False)
    steps = 0
    for ours, theirs, place, other in pairs_of_drafts:
        if place != other or place + 1 >= shared or ours != theirs:
            break
        steps += 1
    return tuple(_cut(recording, shared, steps) for recording in (found, expected))  # type: ignore[return-value]


def _cut(recording: Recording, num_tokens: int, num_steps: int) -> Recording:
    decoded = num_tokens - recording.num_prompt + 1
    stages = {}
    for name, rows in recording.stages.items():
        if name.startswith("head."):
            stages[name] = rows[:num_steps]
        else:
            stages[name] = rows[: num_tokens if name.startswith("target.residual.") else decoded]
    return Recording(
        recording.tokens[:num_tokens],
        recording.num_prompt,
        recording.positions[:num_steps],
        recording.drafts[:num_steps],
        stages,
    )


def differences(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[StageDifference]:
    """Every stage that both have, in the order of `found`. Raises ConfigError for stages of different shapes."""
    result = []
    for stage, rows in found.items():
        if stage not in expected:
            continue
        other = expected[stage].float()
        if rows.shape != other.shape:
            raise ConfigError(f"stage {stage}: expected shape {list(other.shape)}, found {list(rows.shape)}")
        if rows.numel():
            result.append(_difference(stage, rows, other))
    return result


def _difference(stage: str, rows: torch.Tensor, other: torch.Tensor) -> StageDifference:
    distance = (rows.double() - other.double()).abs()
    cosine = torch.nn.functional.cosine_similarity(rows.double(), other.double(), dim=-1)
    overlap = None
    if stage.endswith("logits"):
        count = min(TOP_K, rows.shape[-1])
        ours, theirs = rows.topk(count).indices, other.topk(count).indices
        overlap = float((ours[:, :, None] == theirs[:, None]).any(-1).double().mean())
    return StageDifference(
        stage, rows.shape[0], float(distance.mean()), float(distance.max()), float(cosine.min()), overlap
    )


def save_recording(recording: Recording, directory: str | Path) -> Path:
    """Write a recording as safetensors; the directory is made where it does not exist."""
    path = Path(directory) / FILE
    tensors = {f"stage.{name}": rows.contiguous() for name, rows in recording.stages.items()}
    tensors["tokens"] = torch.tensor(recording.tokens, dtype=torch.int64)
    tensors["num_prompt"] = torch.tensor([recording.num_prompt])
    tensors["positions"] = torch.tensor(recording.positions, dtype=torch.int64)
    tensors["drafts"] = torch.tensor(recording.drafts, dtype=torch.int64)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata={f"{k:06d}": name for k, name in enumerate(recording.stages)})
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    return path


def load_recording(directory: str | Path) -> Recording:
    """Read what `save_recording` wrote. Raises ConfigError for anything else."""
    path = Path(directory) / FILE
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; `lowlat compare --save DIR` writes it")
    try:
        with safe_open(path, framework="pt", backend="pread") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            order = sorted((file.metadata() or {}).items())
        return Recording(
            tuple(tensors["tokens"].tolist()),
            int(tensors["num_prompt"]),
            tuple(tensors["positions"].tolist()),
            tuple(tuple(row) for row in tensors["drafts"].tolist()),
            {name: tensors[f"stage.{name}"] for _, name in order if f"stage.{name}" in tensors},
        )
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError, OSError) as error:
        raise ConfigError(f"{path} is not a recording of `lowlat compare --save`: {error}") from error
