"""The outcome of one request, wherever it ran, and how commands show it: as JSON, as a closing line.

It loads neither torch nor NumPy, so that a client of a server starts at once.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from lowlat.engine.metrics import RequestMetrics
from lowlat.ipc.engine import TokenLogprobs

__all__ = ["Generation", "Output"]


class Output(Protocol):
    """The output of a step, or a chunk from a server, for one request."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def text(self) -> str | None: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def stop_reason(self) -> str | int | None: ...
    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None: ...
    @property
    def simulated(self) -> bool: ...


@dataclass
class Generation:
    """The outcome of one request.

    text      None without a tokenizer
    metrics   its figures as JSON values
    record    the same as the runtime keeps it, where that is this process's own
    channels  the messages of an answer that is written in channels
    """

    token_ids: list[int] = field(default_factory=list)
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None
    simulated: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
    record: RequestMetrics = field(default_factory=lambda: RequestMetrics(""))
    channels: list[dict[str, Any]] | None = None

    def add(self, output: Output) -> None:
        """Append what came."""
        self.token_ids.extend(output.token_ids)
        if output.text is not None:
            self.text = (self.text or "") + output.text
        self.logprobs.extend(output.logprobs or ())
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.simulated = self.simulated or output.simulated

    def to_dict(self, device: str | None, speculation_error: str | None = None) -> dict[str, Any]:
        """All of it as JSON values; what did not happen is left out."""
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
        """Tokens, speed, acceptance, end: one line for people."""
        metrics = self.metrics
        parts = [f"{len(self.token_ids)} tokens", f"{metrics.get('tokens_per_s', 0.0):.1f} tokens/s"]
        speculation = metrics.get("eagle_speculation")
        if speculation is not None:
            parts.append(f"{speculation['mean_acceptance_length']:.2f} tokens a drafted step")
        parts.append(f"finish: {self.finish_reason}")
        if "specpv" in metrics:
            parts.append(f"SpecPV, which is lossy: {metrics['specpv']['partial_steps']} partial steps")
        if self.simulated:
            parts.append("acceptance was simulated: the text means nothing")
        return ", ".join(parts)
