"""This module records lowlat's values stage by stage, and measures their distance from expected ones.

A hook takes the recording from a real runtime, so it shows what decoding computed.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lowlat.engine.runtime import Runtime
from lowlat.errors import ConfigError
from lowlat.graphs.program import Op
from lowlat.models.target import read_model_config
from lowlat.options.request import SamplingParams
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.methods import draft_method
from lowlat.tools.compare.recording import Recording

__all__ = ["StageDifference", "check_same_shape", "common_rows", "differences", "record", "shared_tokens"]

METHODS_COMPARED = ("eagle3", "peagle")
TOP_K = 10
ROUNDING = 1e-12
TARGET_STAGES = {"target.final": "target.pre_head_hidden", "target.logits": "target.logits"}
PARTS = {"middle": "attn_out", "out": "ffn_out"}
# layers before a draft model's last: they run over accepted rows before level 0, and over each deeper level's rows; or,
# where all levels are drafted at once, over one block of rows
LAYER_STAGE = re.compile(r"(draft_model|block|draft\.\d+)\.(layers\.\d+)\.residual\.(middle|out)")
LEVEL_STAGES = {
    **{f"residual.{part}": stage for part, stage in PARTS.items()},
    "final": "pre_head_hidden",
    "logits": "logits",
}


@dataclass(frozen=True)
class StageDifference:
    """The difference of one stage from its expected values; mean and largest difference are absolute.

    `cosine`, and `distance` over the norm of the expected row, are those of the worst row. `top_k_overlap`, for logits,
    is the share of the ten likeliest expected ids that are among the ten likeliest.
    """

    stage: str
    num_rows: int
    mean_difference: float
    max_difference: float
    cosine: float
    distance: float
    top_k_overlap: float | None

    def within(self, min_cosine: float) -> bool:
        """Whether the cosine is at least `min_cosine`, and the distance small enough.

        The distance may be that of rows of equal norm with that cosine, so that a wrong scale is noticed, too. Both
        allow ROUNDING; a `min_cosine` of 0 or less does not bound the distance.
        """
        farthest = math.sqrt(2 * (1 - min_cosine)) if min_cosine > 0 else math.inf
        return self.cosine >= min_cosine - ROUNDING and self.distance <= farthest + ROUNDING

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; None for figures that are not finite."""
        fields = asdict(self).items()
        return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in fields}


class _Recorder:
    """The hook: it copies the rows that each program has just computed for the only request."""

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
        self._buffers.update((name, arguments[argument]) for argument, name in {**op.reads, **op.writes}.items())
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
            elif name in TARGET_STAGES:
                self._add(TARGET_STAGES[name], rows[nodes])

    def _take_drafts(self) -> None:
        """Take the draft model's rows after the last committed token; prefill computed the feature after a prompt."""
        count = int(self._buffers["commit_lens"][0])
        feature = self._buffers.get("draft_model.hidden", self._buffers["prefilled_feature"])
        earlier = {name: LAYER_STAGE.fullmatch(name) for name in self._buffers}
        layers = {name: found for name, found in earlier.items() if found is not None}
        self.positions.append(int(self._buffers["draft_lens"][0]) - 2)
        self.drafts.append(tuple(self._buffers["draft_nodes"][0, 1:].tolist()))
        self._add("draft.fc_out", feature[count - 1 : count])
        at_once = "block.hidden" in self._buffers
        for level in range(len(self.drafts[-1])):
            before = "block" if at_once else f"draft.{level}" if level else "draft_model"
            row = count - 1 + level if at_once else 0 if level else count - 1
            for name, found in layers.items():
                if found[1] == before:
                    self._add(f"draft.{level}.{found[2]}.{PARTS[found[3]]}", self._buffers[name][row : row + 1])
            last, row = ("draft.0", level) if at_once else (f"draft.{level}", 0)
            for name, stage in LEVEL_STAGES.items():
                self._add(f"draft.{level}.{stage}", self._buffers[f"{last}.{name}"][row : row + 1])

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
    executor: str = "reference",
    progress: Callable[[int, int], None] | None = None,
) -> Recording:
    """Decode `num_tokens` greedy tokens with lowlat and record every stage.

    executor  "reference"; or "eager", whose launches are then not fused, and which shows nothing of prefill: residual
              streams are those of the completion alone
    Raises ConfigError for directories that cannot be used, RequestError for a prompt that does not fit.
    """
    speculative = None
    if head is not None:
        method = draft_method(head)
        if method not in METHODS_COMPARED:
            raise ConfigError(
                f"{head}: draft models of method {method!r} cannot be compared, those of "
                f"{' and '.join(METHODS_COMPARED)} can; without a draft model the target is compared"
            )
        speculative = SpeculativeConfig(
            model=head, method=method, num_speculative_tokens=num_speculative_tokens, strict=True
        )
    options: dict[str, Any] = {"max_batch": 1, "dtype": dtype, "device": device, "executor": executor}
    options |= {"prefix_reuse": False, "fuse": executor != "eager"}  # fused kernels do not write some buffers
    options["prompt_logprobs"] = False  # with it, prefill's last residual stream is state
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
    """Return a context that holds the prompt in any tokenisation, at most the model's."""
    longest = len(prompt.encode()) + 8 if isinstance(prompt, str) else len(prompt)
    return max(2, min(longest + num_tokens, read_model_config(target).max_context))


def check_same_shape(target: str | Path, other: str | Path) -> None:
    """Raise ConfigError if two targets' stages have different shapes and cannot be compared."""
    ours, theirs = read_model_config(target), read_model_config(other)
    for name in ("num_layers", "hidden_size", "vocab_size"):
        if getattr(ours, name) != getattr(theirs, name):
            raise ConfigError(
                f"{other} cannot be compared with {target}: its {name} is {getattr(theirs, name)}, not "
                f"{getattr(ours, name)}"
            )


def shared_tokens(found: Recording, expected: Recording) -> int:
    """Return the number of equal tokens from the beginning. Raises ConfigError if the prompts differ."""
    if found.tokens[: found.num_prompt] != expected.tokens[: expected.num_prompt]:
        raise ConfigError("the recordings begin with different prompts; give the prompt of the saved one")
    pairs = zip(found.tokens, expected.tokens, strict=False)
    return next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(found.tokens), len(expected.tokens)))


def common_rows(
    found: Recording, expected: Recording
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[str]]:
    """Return the rows of common stages that depend on equal tokens and drafts, and the stages without such rows.

    Raises ConfigError if the prompts differ.
    """
    shared = shared_tokens(found, expected)
    ours: dict[str, torch.Tensor] = {}
    theirs: dict[str, torch.Tensor] = {}
    for stage in found.stages:
        if stage not in expected.stages:
            continue
        own, other = _rows_by_key(found, stage, shared), _rows_by_key(expected, stage, shared)
        keys = [key for key in own if key in other]
        if keys:
            ours[stage] = found.stages[stage][[own[key] for key in keys]]
            theirs[stage] = expected.stages[stage][[other[key] for key in keys]]
    return ours, theirs, [stage for stage in {**found.stages, **expected.stages} if stage not in ours]


def _rows_by_key(recording: Recording, stage: str, shared: int) -> dict[tuple[int, ...], int]:
    """Return a stage's rows by what they depend on beside shared tokens: position, and drafts up to their level."""
    if stage.startswith("target."):
        count = len(recording.stages[stage])
        first = len(recording.tokens) - 1 - count
        return {(first + row,): row for row in range(min(count, shared - first))}
    level = stage.split(".")[1]
    depth = int(level) if level.isdigit() else 0
    steps = enumerate(zip(recording.positions, recording.drafts, strict=True))
    return {(place, *drafts[:depth]): row for row, (place, drafts) in steps if place + 1 < shared}


def differences(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[StageDifference]:
    """Compare all common stages, in the order of `found`. Raises ConfigError for stages of different shapes."""
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
    apart = (rows.double() - other.double()).abs()
    distance = apart.norm(dim=-1) / other.double().norm(dim=-1).clamp_min(ROUNDING)
    cosine = torch.nn.functional.cosine_similarity(rows.double(), other.double(), dim=-1)
    overlap = None
    if stage.endswith("logits"):
        count = min(TOP_K, rows.shape[-1])
        ours, theirs = rows.topk(count).indices, other.topk(count).indices
        overlap = float((ours[:, :, None] == theirs[:, None]).any(-1).double().mean())
    return StageDifference(
        stage,
        rows.shape[0],
        mean_difference=float(apart.mean()),
        max_difference=float(apart.max()),
        cosine=float(cosine.min()),
        distance=float(distance.max()),
        top_k_overlap=overlap,
    )
