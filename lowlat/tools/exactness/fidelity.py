"""This module measures the distance of a target's distributions from FP32, beside that of transformers in bfloat16.

Rows come from the runtime's own work. For prompts, they are all positions of prefill, over the whole vocabulary; for
answers, all steps of a runtime that speculates, over the likeliest tokens and the sum of the rest. transformers reads
the same tokens in float32, the reference, and in bfloat16. A target passes if both its KL divergence from FP32 and the
error of each token's own logprob are no larger than those of transformers, by the upper bound of a bootstrap.
"""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lowlat.checkpoint.formats import STORED_FORMATS
from lowlat.errors import ConfigError
from lowlat.models.target import read_model_config
from lowlat.options.request import MAX_LOGPROBS, SamplingParams, TokenLogprobs
from lowlat.options.speculative import SpeculativeConfig
from lowlat.tools.bootstrap import block_sums, bootstrap
from lowlat.tools.exactness.decode import decode
from lowlat.tools.exactness.measure import BATCH, Load
from lowlat.tools.exactness.requests import Request, prompt_ids
from lowlat.tools.quality import OPTIONS, prompt_logits
from lowlat.tools.transformers_model import open_transformers, transformers_version

__all__ = ["Compared", "Fidelity", "Rows", "check_positions", "compared", "measure_fidelity"]

WINDOW = 256  # tokens of a prompt
MAX_WINDOWS = 16
BLOCK = 16  # neighbouring positions that a bootstrap draws together
LEAST_BLOCKS = 8
PROMPTS, STEPS = "prompts", "steps"
Tokens = list[int]


@dataclass(frozen=True)
class Compared:
    """An error of lowlat and of transformers in bfloat16, both against float32; means over positions.

    ratio         lowlat's over transformers'
    lower, upper  its 95 % interval
    """

    lowlat: float
    transformers: float
    ratio: float
    lower: float
    upper: float

    @property
    def met(self) -> bool:
        """Whether lowlat's error is no larger."""
        return self.upper <= 1.0


@dataclass(frozen=True)
class Rows:
    """The errors of one kind of rows.

    name       `prompts` or `steps`
    kl         KL divergence of the distributions from float32's, nats a position
    nll_error  distance of the following token's logprob from float32's, nats
    nll        nats a token: of float32, transformers, lowlat
    """

    name: str
    positions: int
    kl: Compared
    nll_error: Compared
    nll: tuple[float, float, float]


@dataclass
class Fidelity:
    """The report of `lowlat doctor --fidelity`."""

    device: str
    executor: str
    numerics: str
    dtype: str
    transformers: str
    rows: list[Rows] = field(default_factory=list)

    @property
    def faithful(self) -> bool:
        """Whether both errors of all rows are no larger than those of transformers."""
        return bool(self.rows) and all(each.kl.met and each.nll_error.met for each in self.rows)

    @property
    def verdict(self) -> str:
        """The verdict, in one sentence."""
        missed = [
            (f"{name} over {each.name} {found.ratio:.3g} x, {found.lower:.3g} to {found.upper:.3g}", found.lower > 1)
            for each in self.rows
            for name, found in (("KL", each.kl), ("the error of logprobs", each.nll_error))
            if not found.met
        ]
        if worse := [text for text, is_worse in missed if is_worse]:
            return f"farther from FP32 than transformers in {self.dtype}: {'; '.join(worse)}"
        if missed:
            texts = "; ".join(text for text, _ in missed)
            return f"undecided whether as close to FP32 as transformers in {self.dtype}, take more prompts: {texts}"
        upper = max(max(each.kl.upper, each.nll_error.upper) for each in self.rows)
        return f"as close to FP32 as transformers in {self.dtype}: errors are at most {upper:.2f} x its own"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {**asdict(self), "faithful": self.faithful, "verdict": self.verdict}


@dataclass(frozen=True)
class _Answer:
    """A prompt and its answer, with the runtime's logprobs of its tokens."""

    tokens: Tokens
    num_prompt: int
    logprobs: list[TokenLogprobs]


def measure_fidelity(
    target: Path,
    speculative: SpeculativeConfig | None,
    prompts: Sequence[Sequence[int] | str],
    *,
    max_tokens: int,
    load: Load,
    report: Callable[[Rows], None] | None = None,
    **options: Any,
) -> Fidelity:
    """Compare a target's distributions with those of transformers in float32 and bfloat16, on the same device.

    speculative  how answers are drafted; None: without drafts
    prompts      texts, or lists of token ids
    max_tokens   the most tokens of an answer, which is sampled at temperature 1
    The other arguments are those of `measure_exactness`. Rounding by the runtime (`quantize`, an FP8 cache) counts as
    its error. Raises ConfigError for a target that transformers cannot load, or that is computed in float32, and for
    too few positions.
    """
    with load(target, speculative, None, max_batch=BATCH, **options) as runtime:
        dtype, choice = runtime.model_config.dtype, runtime.device_choice
        if dtype == "float32":
            raise ConfigError("fidelity is that of a target in bfloat16; this one is computed in float32 (dtype)")
        found = Fidelity(str(choice.device), choice.executor, runtime.numerics, dtype, transformers_version())
        ids = [prompt_ids(runtime, prompt) for prompt in prompts]
        answers = list(_answers(runtime, ids, max_tokens))
        windows = list(_windows(ids, min(WINDOW, runtime.config.max_context - 1)))
    right = _read(target, torch.float32, choice.device, windows, answers)
    other = _read(target, getattr(torch, dtype), choice.device, windows, answers)
    _release()
    with load(target, None, None, **{**options, **OPTIONS}) as runtime:
        own = [
            _errors(rows, torch.cat([each.log_softmax(-1) for each in prompt_logits(runtime, window)]), window)
            for rows, window in zip(right.windows, windows, strict=True)
        ]
    others = [_errors(*each) for each in zip(right.windows, other.windows, windows, strict=True)]
    steps = [_step_errors(rows, _said(answer)) for rows, answer in zip(right.listed, answers, strict=True)]
    other_steps = [_step_errors(*each) for each in zip(right.listed, other.listed, strict=True)]
    for name, mine, theirs in ((PROMPTS, own, others), (STEPS, steps, other_steps)):
        found.rows.append(_rows(name, torch.cat(mine, 1), torch.cat(theirs, 1)))
        if report is not None:
            report(found.rows[-1])
    return found


def check_positions(num_positions: int) -> None:
    """Raise ConfigError for too few positions for an interval."""
    if math.ceil(num_positions / BLOCK) < LEAST_BLOCKS:
        raise ConfigError(
            f"{num_positions} positions say too little; give prompts and tokens for {LEAST_BLOCKS * BLOCK}"
        )


def compared(own: torch.Tensor, other: torch.Tensor) -> Compared:
    """Compare both errors [n] by position, over blocks of neighbours. Raises ConfigError for too few."""
    check_positions(len(own))
    mine, theirs = block_sums(own, BLOCK), block_sums(other, BLOCK)
    lower, upper = bootstrap(len(mine), lambda drawn: mine[drawn].sum(1) / theirs[drawn].sum(1))
    means = float(own.mean()), float(other.mean())
    return Compared(*means, means[0] / means[1], lower, upper)


def _rows(name: str, own: torch.Tensor, other: torch.Tensor) -> Rows:
    """The rows of errors [3, n]: KL divergence, and the logprob of the token that follows, here and in float32."""
    right, mine, theirs = own[2], own[1], other[1]
    return Rows(
        name,
        own.shape[1],
        compared(own[0], other[0]),
        compared((mine - right).abs(), (theirs - right).abs()),
        (-float(right.mean()), -float(theirs.mean()), -float(mine.mean())),
    )


def _answers(runtime: Any, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> Iterator[_Answer]:
    """Decode the answers to prompts, in groups."""
    settings: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0, "logprobs": MAX_LOGPROBS}
    requests = [
        Request(str(place), ids, SamplingParams(max_tokens=max_tokens, seed=place, **settings))
        for place, ids in enumerate(prompts)
    ]
    for place in range(0, len(requests), BATCH):
        group, logprobs = requests[place : place + BATCH], dict[str, list[TokenLogprobs]]()
        answers = decode(runtime, STEPS, group, logprobs=logprobs)
        for request, (name, tokens) in zip(group, answers.items(), strict=True):
            yield _Answer([*request.prompt, *tokens], len(request.prompt), logprobs[name])


def _windows(prompts: Sequence[tuple[int, ...]], size: int) -> Iterator[Tokens]:
    """Cut all prompts, one after the other, into windows."""
    tokens = [token for ids in prompts for token in ids]
    for start in range(0, min(len(tokens), size * MAX_WINDOWS), size):
        window = tokens[start : start + size]
        if len(window) > 1:
            yield window


@dataclass(frozen=True)
class _Reading:
    """A model's logprobs on the host: of windows [n, V], and of the tokens listed in answers [n, 1 + k]."""

    windows: list[torch.Tensor]
    listed: list[torch.Tensor]


@torch.no_grad()
def _read(
    target: Path, dtype: torch.dtype, device: torch.device, windows: Sequence[Tokens], answers: Sequence[_Answer]
) -> _Reading:
    """Read windows and answers with transformers in a dtype, and free its memory."""
    config = read_model_config(target)
    stored = STORED_FORMATS["bf16" if config.experts is None else config.experts.weight_format]
    _release()
    model = open_transformers(target, dtype, stored, device=device)

    def scored(tokens: Tokens) -> torch.Tensor:
        logits: torch.Tensor = model(torch.tensor([tokens], device=device), use_cache=False).logits[0]
        return logits.float().log_softmax(-1)

    listed = [_listed(scored(each.tokens[:-1]), each) for each in answers]
    return _Reading([scored(window).cpu() for window in windows], listed)


def _errors(right: torch.Tensor, found: torch.Tensor, window: Tokens) -> torch.Tensor:
    """KL divergence, the next token's logprob, and that of float32, [3, n - 1], of logprobs [n, V]."""
    following = torch.tensor(window[1:])[:, None]
    kl = []
    for rows, others in zip(right[:-1].split(32), found[:-1].cpu().split(32), strict=True):
        rows, others = rows.double(), others.double()
        kl.append((rows.exp() * (rows - others)).sum(-1))
    logprobs = [rows[:-1].cpu().gather(1, following)[:, 0].double() for rows in (found, right)]
    return torch.stack([torch.cat(kl).clamp_min(0.0), *logprobs])


def _ids(answer: _Answer) -> torch.Tensor:
    """Return for each token of an answer the token itself and the likeliest ones there, [n, 1 + k]."""
    return torch.tensor([[each.token_id, *(token for token, _ in each.top)] for each in answer.logprobs])


def _listed(rows: torch.Tensor, answer: _Answer) -> torch.Tensor:
    """Return logprobs of the tokens of `_ids`, [n, 1 + k] float64, from the rows of prompt and answer."""
    answered = rows[answer.num_prompt - 1 :]
    return answered.gather(1, _ids(answer).to(rows.device)).double().cpu()


def _said(answer: _Answer) -> torch.Tensor:
    """Return the same logprobs as the runtime reported them."""
    rows = [[each.logprob, *(logprob for _, logprob in each.top)] for each in answer.logprobs]
    return torch.tensor(rows, dtype=torch.float64)


def _step_errors(right: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Return `_errors` of logprobs [n, 1 + k]; the KL divergence is over the k tokens and the sum of all others."""

    def whole(listed: torch.Tensor) -> torch.Tensor:
        rest = (1.0 - listed.exp().sum(-1, keepdim=True)).clamp_min(math.ulp(1.0))
        return torch.cat([listed, rest.log()], 1)

    rows, others = whole(right[:, 1:]), whole(found[:, 1:])
    kl = (rows.exp() * (rows - others)).sum(-1).clamp_min(0.0)
    return torch.stack([kl, found[:, 0], right[:, 0]])


def _release() -> None:
    """Free the device memory of models that are no longer needed."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
