"""This module times steps beside copies and steps alone, in turns, so that contexts are alike.

A step counts if only one request ran in it, and copies were under way (or none was) both before and after it.
"""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from bench.lib.clock import percentile
from lowlat import Runtime, SamplingParams
from lowlat.sequence.tiers.tiers import CacheTiers

__all__ = ["BUS_BYTES", "Copies", "PlainCopies", "StepsBeside", "TierCopies"]

BUS_BYTES = 1 << 30
ALONE = 40  # steps of a turn without copies
PLAIN_COPIES = 8  # of a turn


class Copies(Protocol):
    """Copies to the device, some in each turn."""

    def start(self) -> None:
        """Begin a turn."""

    def under_way(self) -> bool:
        """Whether some are."""

    def ended(self) -> bool:
        """Whether the turn is over."""

    def num_bytes(self) -> int:
        """Bytes that have come since the load."""


class PlainCopies:
    """Copies of one piece of pinned memory to the device: nothing of the host's is busy with them."""

    def __init__(self, device: torch.device) -> None:
        self._stream, self._num_bytes = torch.cuda.Stream(device), 0
        self._host = torch.empty(BUS_BYTES, dtype=torch.uint8, pin_memory=True)
        self._target = torch.empty(BUS_BYTES, dtype=torch.uint8, device=device)

    def start(self) -> None:
        """Begin a turn."""
        with torch.cuda.stream(self._stream):
            for _ in range(PLAIN_COPIES):
                self._target.copy_(self._host, non_blocking=True)
        self._num_bytes += PLAIN_COPIES * BUS_BYTES

    def under_way(self) -> bool:
        """Whether some are."""
        return not self._stream.query()

    def ended(self) -> bool:
        """Whether the turn is over."""
        return self._stream.query()

    def num_bytes(self) -> int:
        """Bytes of all turns that were begun."""
        return self._num_bytes


class TierCopies:
    """Prompts that host memory has, brought to the device in turns: each takes the place of the one before."""

    def __init__(self, runtime: Runtime, tiers: CacheTiers, prompts: Sequence[list[int]]) -> None:
        self._runtime, self._tiers, self._prompts, self._turn = runtime, tiers, prompts, 0

    def start(self) -> None:
        """Begin a turn."""
        self._runtime.submit(self._prompts[self._turn % len(self._prompts)], SamplingParams(max_tokens=1))
        self._turn += 1

    def under_way(self) -> bool:
        """Whether some are."""
        return self._tiers.num_loads > 0

    def ended(self) -> bool:
        """Whether the turn is over."""
        return self._runtime.scheduler.num_queued == 0 and len(self._runtime.slots()) < 2

    def num_bytes(self) -> int:
        """Bytes that have come since the load."""
        return self._tiers.counts.bytes_in


class StepsBeside:
    """Steps of the request that decodes in a runtime, next to copies and alone."""

    def __init__(self, runtime: Runtime, copies: Copies) -> None:
        self._runtime, self._copies = runtime, copies
        self._alone, self._beside = list[float](), list[float]()
        self._bytes, self._seconds = 0, 0.0

    def run(self, count: int, seconds: float) -> None:
        """Measure until `count` steps were next to copies, or so much time has passed, or the request has ended."""
        begun = time.monotonic()
        while len(self._beside) < count and time.monotonic() - begun < seconds and self._decodes():
            for _ in range(ALONE):
                self._step()
            before, since = self._copies.num_bytes(), time.perf_counter()
            self._copies.start()
            while not self._copies.ended() and self._decodes():
                self._step()
            self._bytes += self._copies.num_bytes() - before
            self._seconds += time.perf_counter() - since

    def row(self) -> dict[str, Any]:
        """Figures of both, and of the turns' copies."""
        found: dict[str, Any] = {"num_steps": len(self._beside), "num_alone": len(self._alone)}
        if not self._beside or not self._alone:
            return found
        alone, beside = _figures(self._alone), _figures(self._beside)
        found |= {f"{name}_ms": value for name, value in beside.items()}
        found |= {f"{name}_alone_ms": value for name, value in alone.items()}
        found |= {f"{name}_over_alone": beside[name] / alone[name] - 1 for name in beside}
        return found | {"gb_per_s": self._bytes / self._seconds / 1e9}

    def _step(self) -> None:
        copies, runtime = self._copies, self._runtime
        begin, before = time.perf_counter(), copies.under_way()
        outputs = runtime.step()
        took, after = 1e3 * (time.perf_counter() - begin), copies.under_way()
        if before is after and len(outputs) == 1 and len(outputs[0].token_ids) == 1 and len(runtime.slots()) == 1:
            (self._beside if before else self._alone).append(took)

    def _decodes(self) -> bool:
        return any(slot["phase"] == "decoding" for slot in self._runtime.slots())


def _figures(times: Sequence[float]) -> dict[str, float]:
    return {"mean": sum(times) / len(times), **{f"p{k}": percentile(times, k) for k in (50, 90, 99)}}
