"""This module measures a target's quality on a text, and how far it lies from another target.

Both targets read the same windows, a chunk of a prompt at a time, as a runtime prefills them; the logits of a chunk are
compared where they are and then written over, so that a text of any length takes the memory of one chunk.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from lowlat.engine.runtime import Runtime
from lowlat.errors import ConfigError, LowlatError, RequestError
from lowlat.options.request import SamplingParams
from lowlat.text import TextCodec

__all__ = ["OPTIONS", "Divergence", "Model", "Quality", "Sums", "measure_quality", "prompt_logits", "read_text"]

OPTIONS: dict[str, Any] = {"max_batch": 1, "prefix_reuse": False, "prompt_logits": True}  # of the runtimes
MAX_TEXT_BYTES = 64 << 20
ROWS_AT_ONCE = 32  # rows of logits that are held in float64


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """One target's figures.

    kv_cache           how keys and values are kept: fp8, or the compute dtype
    activations        what prompts' rows are rounded to: fp8, or the compute dtype
    formats            in which quantised layers and experts are held; empty where all are plain
    mean_log_loss      nats a token that was predicted
    perplexity         e to that power
    """

    model: str
    formats: tuple[str, ...]
    dtype: str
    kv_cache: str
    activations: str
    mean_log_loss: float
    perplexity: float


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """How far a target's distributions of the next token lie from the other's.

    mean_kl, p99_kl, max_kl  KL divergence of the target from the other, nats, over the positions
    top1_agreement           share of positions at which the likeliest token is the same
    log_loss_increase        nats a token: the target's mean_log_loss less the other's
    """

    mean_kl: float
    p99_kl: float
    max_kl: float
    top1_agreement: float
    log_loss_increase: float


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """The report of `lowlat inspect quality`.

    num_tokens     tokens of the text
    num_predicted  tokens predicted, each by those before it in its window: all but the first of each window
    num_windows    windows that the text was cut into; each is a prompt of its own
    window_tokens  tokens of the longest window, the token that begins every prompt of the model included
    against, divergence  None where nothing was compared
    """

    text: str
    num_tokens: int
    num_predicted: int
    num_windows: int
    window_tokens: int
    device: str
    executor: str
    target: Model
    against: Model | None = None
    divergence: Divergence | None = None


def read_text(path: Path) -> str:
    """A text file. Raises ConfigError for one that cannot be read, is longer than 64 MiB or is not UTF-8."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
        if len(data) > MAX_TEXT_BYTES:
            raise ConfigError(f"{path}: has more than {MAX_TEXT_BYTES} bytes; take a part of it")
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8: byte {error.start}") from error


def measure_quality(
    target: Runtime,
    against: Runtime | None,
    text: str,
    *,
    max_tokens: int | None = None,
    text_name: str = "text",
    progress: Callable[[int, int], None] | None = None,
) -> Quality:
    """Perplexity of a target on a text and, where there is another, of that and the divergence between them.

    target, against  runtimes loaded with OPTIONS; their tokenizers must give the same tokens. Windows are as long as
                     the shorter context allows, with room for a token that a prompt's end draws
    max_tokens       the text's first tokens alone
    progress         called with predicted tokens and tokens to predict
    Raises ConfigError for two targets that cannot be compared, RequestError for a text that has no two tokens,
    LowlatError for logits that are not finite.
    """
    runtimes = [target] if against is None else [target, against]
    head, tokens = _tokens(target, text)
    if against is not None:
        _check_comparable(target, against, (head, tokens), text)
    tokens = tokens[:max_tokens]
    room = min(runtime.config.max_context for runtime in runtimes) - 1
    windows = list(_windows(head, tokens, room))
    total = sum(len(window) - 1 for window in windows)
    if not total:
        raise RequestError(f"{text_name}: {len(tokens)} tokens leave none to predict; give a longer text")
    sums = Sums(len(runtimes))
    for window in windows:
        for start, logits in _chunks(runtimes, window):
            sums.add(logits, window[start + 1 : start + 1 + logits[0].shape[0]])
            if progress is not None:
                progress(sums.count, total)
    models = [_model(runtime, sums.losses[place] / total) for place, runtime in enumerate(runtimes)]
    return Quality(
        text=text_name,
        num_tokens=len(tokens),
        num_predicted=total,
        num_windows=len(windows),
        window_tokens=max(map(len, windows)),
        device=str(target.device_choice.device),
        executor=target.executor.name,
        target=models[0],
        against=None if against is None else models[1],
        divergence=None if against is None else sums.divergence(),
    )


def prompt_logits(runtime: Runtime, prompt: Sequence[int]) -> Iterator[torch.Tensor]:
    """The logits after every token of a prompt, chunk after chunk, each [n, V] float32 on the runtime's device.

    runtime  idle, and loaded with OPTIONS
    A chunk's tensor is written over by the next. Raises LowlatError where the request fails.
    """
    chunk, logits = runtime.geometry.prefill_chunk, runtime.executor.state["prompt_logits"]
    runtime.submit(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    for start in range(0, len(prompt), chunk):
        for output in runtime.step():
            if output.error is not None:
                raise LowlatError(f"a window failed: {output.error}")
        yield logits[: min(chunk, len(prompt) - start)]
    while runtime.busy:
        runtime.step()


def _chunks(runtimes: Sequence[Runtime], window: Sequence[int]) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Positions that have a next token, chunk after chunk: the first, and the logits of all runtimes."""
    start, last = 0, len(window) - 1
    for chunks in zip(*(prompt_logits(runtime, window) for runtime in runtimes), strict=True):
        if start < last:
            yield start, [rows[: last - start].to(chunks[0].device) for rows in chunks]
        start += chunks[0].shape[0]


class Sums:
    """Figures added up over positions."""

    def __init__(self, num_models: int) -> None:
        self.count = 0
        self.losses = [0.0] * num_models
        self._same = 0
        self._kl: list[torch.Tensor] = []

    def add(self, logits: Sequence[torch.Tensor], following: Sequence[int]) -> None:
        """Add positions: each target's logits [n, V], and the tokens that follow. Raises LowlatError."""
        expected = torch.tensor(following, device=logits[0].device)
        pieces = zip(*(rows.split(ROWS_AT_ONCE) for rows in (*logits, expected)), strict=True)
        for *rows, tokens in pieces:
            logs = [each.double().log_softmax(-1) for each in rows]
            losses = [-each.gather(1, tokens[:, None]).sum().item() for each in logs]
            if not all(torch.isfinite(each).all() for each in rows):
                raise LowlatError(f"logits after {self.count} tokens are not finite; try dtype float32")
            self.losses = [before + loss for before, loss in zip(self.losses, losses, strict=True)]
            if len(logs) == 2:
                own, other = logs
                self._kl.append((other.exp() * (other - own)).sum(-1).cpu())
                self._same += int((own.argmax(-1) == other.argmax(-1)).sum())
            self.count += len(tokens)

    def divergence(self) -> Divergence:
        """The divergence of the first target from the second."""
        kl = torch.cat(self._kl).clamp_min(0.0)  # rounding may leave equal distributions just below
        return Divergence(
            mean_kl=float(kl.mean()),
            p99_kl=float(kl.sort().values[math.ceil(0.99 * len(kl)) - 1]),
            max_kl=float(kl.max()),
            top1_agreement=self._same / self.count,
            log_loss_increase=(self.losses[0] - self.losses[1]) / self.count,
        )


def _codec(runtime: Runtime) -> TextCodec:
    if runtime.codec is None:
        raise ConfigError(f"{runtime.directory}: a text needs tokenizer.json in the model directory")
    return runtime.codec


def _tokens(runtime: Runtime, text: str) -> tuple[list[int], list[int]]:
    """The tokens that begin every prompt of the model, and those of the text."""
    codec = _codec(runtime)
    framed, plain = codec.encode("a"), codec.encode("a", add_special_tokens=False)
    place = next((k for k in range(len(framed)) if framed[k : k + len(plain)] == plain), 0)
    return framed[:place], codec.encode(text, add_special_tokens=False)


def _check_comparable(target: Runtime, against: Runtime, tokens: tuple[list[int], list[int]], text: str) -> None:
    sizes = [runtime.model_config.vocab_size for runtime in (target, against)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{target.directory} has a vocabulary of {sizes[0]} tokens and {against.directory} one of {sizes[1]}, so "
            "that their distributions cannot be compared"
        )
    if _codec(target).fingerprint != _codec(against).fingerprint and _tokens(against, text) != tokens:
        raise ConfigError(
            f"the tokenizers of {target.directory} and {against.directory} give other tokens for the text"
        )


def _windows(head: Sequence[int], tokens: Sequence[int], room: int) -> Iterator[list[int]]:
    """The text in prompts of at most `room` tokens, `head` before each; the last may be short."""
    size = room - len(head)
    if size < 2:
        raise ConfigError(f"max_context {room + 1} leaves no room for two tokens of the text; raise it")
    for start in range(0, len(tokens), size):
        window = [*head, *tokens[start : start + size]]
        if len(window) > 1:
            yield window


def _model(runtime: Runtime, log_loss: float) -> Model:
    config = runtime.model_config
    names = set() if config.quantisation is None else set(config.quantisation.format_names)
    names |= set() if config.quantiser is None else {config.quantiser.packed.name}
    names |= set() if config.experts is None else {config.experts.weight_format} - {"bf16"}
    return Model(
        model=str(runtime.directory),
        formats=tuple(sorted(names)),
        dtype=config.dtype,
        kv_cache=config.dtype if config.coded_kv is None else "fp8",
        activations="fp8" if config.coded_rows else config.dtype,
        mean_log_loss=log_loss,
        perplexity=math.exp(min(log_loss, 700.0)),
    )
