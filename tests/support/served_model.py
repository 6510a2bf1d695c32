"""This module serves a small random pair, or the bundled one, on the reference executor in the tests' process."""

import atexit
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from tiny_models import PairPaths, make_pair

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.ipc.engine import Codec
from lowlat.ipc.limits import Limits
from lowlat.ipc.server import Server
from lowlat.options.request import StepOutput
from lowlat.serving.engine import RuntimeEngine

__all__ = ["HEAD", "TARGET", "ServedModel", "alone", "load_bundled", "load_small", "served_model", "small_pair"]

TARGET = Path(__file__).parents[2] / "lowlat" / "demo" / "target"
HEAD = TARGET.with_name("head")


def load_bundled(**options: Any) -> Runtime:
    """Load the bundled target and draft model, with three draft tokens a step."""
    return _load(PairPaths(TARGET, HEAD), options)


def load_small(**options: Any) -> Runtime:
    """Load a random pair of two layers, with 97 tokens and no text, whose step takes a seventh of the bundled one's."""
    return _load(small_pair(), options)


@cache
def small_pair() -> PairPaths:
    """Write the files of that pair."""
    folder = tempfile.TemporaryDirectory(prefix="lowlat-")
    atexit.register(folder.cleanup)
    return make_pair(Path(folder.name), "llama")


def _load(pair: PairPaths, options: dict[str, Any]) -> Runtime:
    draft = SpeculativeConfig(
        model=options.pop("head", pair.head), num_speculative_tokens=3, strict=options.pop("strict", True)
    )
    return Runtime.load(pair.target, draft, **{"max_batch": 3, "max_context": 256, "device": "cpu", **options})


def alone(runtime: Runtime, prompt: Sequence[int], **sampling: Any) -> tuple[int, ...]:
    """Decode a request alone in the runtime; returns its tokens."""
    runtime.submit(prompt, SamplingParams(**sampling))
    tokens: list[int] = []
    while runtime.busy:
        tokens.extend(token for output in runtime.step() for token in output.token_ids)
    return tuple(tokens)


class ServedModel(RuntimeEngine):
    """A RuntimeEngine that counts its steps, and can do something before one, in the decode thread.

    trace   ("cancel", id) and ("end", id) with the number of steps done by then
    """

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.runtime = runtime
        self.num_steps = 0
        self.trace: dict[tuple[str, str], int] = {}
        self.order: list[str] = []
        self.before_step: Callable[[ServedModel], None] | None = None

    def submit(
        self, request_id: str, prompt: Sequence[int], sampling: Any, cache_salt: str = "", session: str = ""
    ) -> None:
        """Take a request, and record the time."""
        super().submit(request_id, prompt, sampling, cache_salt, session)
        self.order.append(request_id)

    def cancel(self, request_id: str) -> None:
        """End a request, and record the time."""
        super().cancel(request_id)
        self.trace["cancel", request_id] = self.num_steps

    def step(self) -> list[StepOutput]:
        """Step, after whatever is to be done before."""
        if self.before_step is not None:
            self.before_step(self)
        outputs = super().step()
        self.num_steps += 1
        for output in outputs:
            if output.finish_reason is not None:
                self.trace["end", output.request_id] = self.num_steps
        return outputs


@contextmanager
def served_model(
    folder: Path, runtime: Runtime, codec: Codec | None = None, **limits: Any
) -> Iterator[tuple[Server, ServedModel]]:
    """A server of this runtime; afterwards the runtime is closed and its books must balance."""
    engine = ServedModel(runtime)
    with Server(engine, codec, f"ipc://{folder}/m.sock", Limits(**limits)) as server:
        yield server, engine
    runtime.kvcache.invariants()
    assert runtime.kvcache.stats().num_used == 0
    assert not runtime.slots()
