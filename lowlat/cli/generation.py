"""This module has the result of one request, in process or in a server, and shows it as JSON or as a closing line.

It loads neither torch nor NumPy, so that a client of a server starts at once.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from lowlat.engine.metrics import RequestMetrics
from lowlat.errors import StreamError
from lowlat.ipc.chunk import Chunk
from lowlat.ipc.messages import TokenLogprob

__all__ = ["Asked", "Generation"]


class Chunks(AbstractContextManager["Chunks"], Protocol):
    """The chunks of one request, in process or from a server; leaving it cancels a running request."""

    def __iter__(self) -> Iterator[Chunk]: ...


@dataclass
class Generation:
    """The result of one request.

    text         its text; None without a tokenizer
    reasoning    with parsing, the model's reasoning
    max_context  limit of prompt and answer together, in tokens; 0: not known
    metrics      its figures as JSON values
    record       the runtime's record of these figures, if it ran in this process
    channels     the messages of an answer that is written in channels
    """

    token_ids: list[int] = field(default_factory=list)
    text: str | None = None
    reasoning: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None
    simulated: bool = False
    max_context: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    record: RequestMetrics = field(default_factory=lambda: RequestMetrics(""))
    channels: list[dict[str, Any]] | None = None

    def add(self, chunk: Chunk) -> None:
        """Append what came."""
        self.token_ids.extend(chunk.token_ids)
        if self.text is not None:
            self.text += chunk.text
        self.reasoning += chunk.reasoning_content
        self.logprobs.extend(chunk.logprobs or ())
        self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason
        self.simulated = self.simulated or chunk.simulated
        self.metrics = chunk.metrics or self.metrics

    def to_dict(self, device: str | None, speculation_error: str | None = None) -> dict[str, Any]:
        """Return the result as JSON values, without parts that do not apply."""
        result: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "device": device,
            "metrics": self.metrics,
        }
        if self.logprobs:
            result["logprobs"] = [
                {"token_id": entry.token_id, "logprob": entry.logprob, "top": [list(pair) for pair in entry.top]}
                for entry in self.logprobs
            ]
        if self.channels is not None:
            result["channels"] = self.channels
        if speculation_error is not None:
            result["speculation_error"] = speculation_error
        if self.simulated:
            result["simulated"] = True
        if self.error is not None:
            result["error"] = self.error
        return result

    def closing_line(self) -> str:
        """Return one line for people: tokens, speed, acceptance, and how it ended."""
        metrics = self.metrics
        parts = [f"{len(self.token_ids)} tokens", f"{metrics.get('tokens_per_s', 0.0):.1f} tokens/s"]
        speculation = metrics.get("eagle_speculation")
        if speculation is not None:
            parts.append(f"{speculation['mean_acceptance_length']:.2f} tokens a drafted step")
        parts.append(self.ending())
        if "specpv" in metrics:
            parts.append(f"SpecPV, which is lossy: {metrics['specpv']['partial_steps']} partial steps")
        if self.simulated:
            parts.append("acceptance was simulated: the text means nothing")
        return ", ".join(parts)

    def ending(self) -> str:
        """Return how it ended, in words; if it was cut off, also the option that allows more."""
        if self.finish_reason != "length":
            return "ended by itself" if self.finish_reason == "stop" else str(self.finish_reason)
        cut = f"cut at {len(self.token_ids)} tokens"
        if self.max_context and self.metrics.get("prompt_tokens", 0) + len(self.token_ids) >= self.max_context:
            return f"{cut}, where the context of {self.max_context} is full (--max-context)"
        return f"{cut}; --max-tokens allows more"


class Asked:
    """A request under way, in process or in a server; `generation` is its result so far, also after an interrupt."""

    def __init__(self, chunks: Chunks, *, has_text: bool, max_context: int = 0) -> None:
        self.generation = Generation(text="" if has_text else None, max_context=max_context)
        self._chunks = chunks

    def run(self, on_chunk: Callable[[Chunk], None] | None = None) -> Generation:
        """Read the request to its end, and pass each chunk on; one that breaks off keeps its result, with `error`.

        Ctrl-C cancels it. Raises RequestError or Busy for a request that was refused.
        """
        generation = self.generation
        try:
            with self._chunks as chunks:
                for chunk in chunks:
                    generation.add(chunk)
                    if on_chunk is not None:
                        on_chunk(chunk)
        except StreamError as error:
            generation.finish_reason, generation.error = "error", str(error)
            generation.token_ids = list(error.token_ids)
            if generation.text is not None:
                generation.text = error.text
        return generation
