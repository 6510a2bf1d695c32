"""This module measures a target's quality on a text, and how far it lies from another target.

Both targets read the same windows, a chunk of a prompt at a time, by a runtime's prefill. The logits of a chunk are
compared in place, and the next chunk overwrites them, so that a text of any length takes the memory of one chunk.
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

OPTIONS: dict[str, Any] = {"max_batch": 1, "prefix_reuse": False, "prompt_logits": True}  # options of both runtimes
MAX_TEXT_BYTES = 64 << 20
ROWS_AT_ONCE = 32  # rows of logits that are in float64 at a time


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """One target's figures.

    kv_cache           the dtype of keys and values: fp8, or the compute dtype
    activations        the dtype to which prompts' rows are rounded: fp8, or the compute dtype
    formats            the formats of quantised layers and experts; empty if all are plain
    mean_log_loss      nats for each predicted token
    perplexity         exp(mean_log_loss)
    """

    model: str
    formats: tuple[str, ...]
    dtype: str
    kv_cache: str
    activations: str
    mean_log_loss: float
    perplexity: float


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The distance of a target's distributions of the next token from the other's.

    mean_kl, p99_kl, max_kl  KL divergence of the target from the other, nats, over the positions
    top1_agreement           share of positions at which the likeliest token is the same
    log_loss_increase        nats a token: the target's mean_log_loss minus the other's
    """

    mean_kl: float
    p99_kl: float
    max_kl: float
    top1_agreement: float
    log_loss_increase: float


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """The report of `lowlat inspect quality`.

    num_tokens     tokens of the text
    num_predicted  predicted tokens: all but the first of each window, each from those before it in the window
    num_windows    windows that the text was cut into; each is a prompt of its own
    window_tokens  tokens of the longest window, with the token that begins each prompt of the model
    against, divergence  None if there was no second target
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
    """Read a text file. Raises ConfigError if it cannot be read, is larger than 64 MiB or is not UTF-8."""
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
    """Measure a target's perplexity on a text and, if `against` is given, also that one's and their divergence.

    target, against  runtimes loaded with OPTIONS; their tokenizers must give the same tokens. Windows are as long as
                     the shorter context allows, with space for the token that is drawn after a prompt
    max_tokens       use only so many of the text's first tokens
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
    """Yield the logits after each token of a prompt, chunk by chunk, each [n, V] float32 on the runtime's device.

    runtime  idle, and loaded with OPTIONS
    The next chunk overwrites a chunk's tensor. Raises LowlatError if the request fails.
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
    """Yield the positions that have a next token, chunk by chunk: the first one, and the logits of all runtimes."""
    start, last = 0, len(window) - 1
    for chunks in zip(*(prompt_logits(runtime, window) for runtime in runtimes), strict=True):
        if start < last:
            yield start, [rows[: last - start].to(chunks[0].device) for rows in chunks]
        start += chunks[0].shape[0]


class Sums:
    """Sums of figures over positions."""

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
        """Return the divergence of the first target from the second."""
        kl = torch.cat(self._kl).clamp_min(0.0)  # rounding may give equal distributions a value just below 0
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
    """Return the tokens that begin each prompt of the model, and those of the text."""
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
    """Cut the text into prompts of at most `room` tokens, with `head` before each; the last may be short."""
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
