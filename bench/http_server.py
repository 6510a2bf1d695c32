"""The server that bench.http measures: any engine, whose texts are replaced by the times at which their steps ended."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowlat.ipc.engine import Engine, EngineInfo, EngineOutput
from lowlat.ipc.limits import Limits
from lowlat.ipc.server import Server
from lowlat.ipc.wire import Sampling

if TYPE_CHECKING:
    from lowlat.serving.engine import RuntimeEngine

__all__ = ["MODEL", "StampingEngine", "serve"]

MODEL = "measured"
DEPTH = 3


class StampingEngine:
    """Another engine, whose tokens say when their step ended, in seconds of the system's monotonic clock.

    A text is "TIME " for each of a step's tokens; before the first one stands "@TIME ", when the request got its slot.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._admitted: dict[str, str] = {}

    @property
    def info(self) -> EngineInfo:
        """As the other's, under one name, and with text."""
        return replace(self._engine.info, model=MODEL, tokenizer=self._engine.info.tokenizer or "a hash")

    def validate(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """See Engine."""
        self._engine.validate(prompt, sampling)

    def compile(self, sampling: Sampling, patience_s: float | None) -> object:
        """See Engine."""
        return self._engine.compile(sampling, patience_s)

    def submit(
        self, request_id: str, prompt: Sequence[int], sampling: Sampling, cache_salt: str = "", session: str = ""
    ) -> None:
        """Take a request, and note the time."""
        self._admitted[request_id] = f"@{time.monotonic():.6f} "
        self._engine.submit(request_id, prompt, sampling, cache_salt, session)

    def open_prompt(
        self,
        request_id: str,
        sampling: Sampling,
        cache_salt: str = "",
        session: str = "",
        max_prompt_tokens: int | None = None,
    ) -> None:
        """Take a request whose prompt is still being written."""
        self._engine.open_prompt(request_id, sampling, cache_salt, session, max_prompt_tokens)

    def grow_prompt(self, request_id: str, token_ids: Sequence[int]) -> None:
        """See Engine."""
        self._engine.grow_prompt(request_id, token_ids)

    def finish_prompt(self, request_id: str, token_ids: Sequence[int], *, speculative: bool = False) -> None:
        """End an open prompt, and note the time."""
        self._admitted[request_id] = f"@{time.monotonic():.6f} "
        self._engine.finish_prompt(request_id, token_ids, speculative=speculative)

    def cancel(self, request_id: str) -> None:
        """See Engine."""
        self._engine.cancel(request_id)

    def pause(self, request_id: str) -> bool:
        """See Engine."""
        return self._engine.pause(request_id)

    def resume(self, request_id: str) -> None:
        """See Engine."""
        self._engine.resume(request_id)

    @property
    def deadline(self) -> float | None:
        """See Engine."""
        return self._engine.deadline

    def watch(self, wake: Callable[[], None]) -> None:
        """See Engine."""
        self._engine.watch(wake)

    @property
    def busy(self) -> bool:
        """See Engine."""
        return self._engine.busy

    def step(self) -> list[EngineOutput]:
        """Run one step, then stamp its tokens with the time."""
        outputs = self._engine.step()
        stamp = f"{time.monotonic():.6f} "
        return [self._stamped(output, stamp) for output in outputs]

    def metrics(self, request_id: str) -> Mapping[str, Any]:
        """See Engine."""
        return self._engine.metrics(request_id)

    def stats(self) -> Mapping[str, Any]:
        """See Engine."""
        return self._engine.stats()

    def sleep(self) -> None:
        """See Engine."""
        self._engine.sleep()

    def wake(self) -> None:
        """See Engine."""
        self._engine.wake()

    def close(self) -> None:
        """See Engine."""
        self._engine.close()

    def _stamped(self, output: Any, stamp: str) -> EngineOutput:
        text = self._admitted.pop(output.request_id, "") + stamp * len(output.token_ids) if output.token_ids else ""
        stamped: EngineOutput = replace(output, text=text)
        return stamped


def serve(options: argparse.Namespace, *, slots: int, step_s: float) -> int:
    """Serve an engine at `options.serve` until the process is ended, after a line that says what it is."""
    sys.setswitchinterval(0.0005)  # as `lowlat serve` does
    facts: dict[str, Any] = {}

    def make() -> StampingEngine:
        if options.model is None:
            from fake_engine import FakeEngine

            engine: Engine = FakeEngine(step_s, max_running=slots, text=True, tokenizer="a hash")
            facts.update(model="steps of a constant time", device="none", step_ms=1e3 * step_s)
        else:
            engine = _model_engine(options, slots, facts)
        facts["vocab_size"] = engine.info.vocab_size
        return StampingEngine(engine)

    server = Server(make, None, options.serve, Limits())
    server.start()
    print(json.dumps(facts), flush=True)
    return server.run()


def _model_engine(options: argparse.Namespace, slots: int, facts: dict[str, Any]) -> "RuntimeEngine":
    from bench.lib.conditions import release
    from bench.lib.model import Model
    from bench.start import write_checkpoint
    from lowlat import Runtime, SpeculativeConfig
    from lowlat.cli.options import bundled
    from lowlat.serving.engine import RuntimeEngine

    target, draft = Path(options.model), options.draft_model
    if options.model == "bundled":
        target, draft = bundled("target"), bundled("head")
    elif options.write_llama:
        if not (target / "head" / "config.json").is_file():
            import torch

            device = torch.device(options.device or "cuda:0")
            write_checkpoint(Model("llama-8b"), target, device)
            release(device)
        target, draft = target / "target", target / "head"
    speculative = None if draft is None else SpeculativeConfig(model=draft, num_speculative_tokens=DEPTH, strict=True)
    context = 256 + options.prompt + options.tokens
    runtime = Runtime.load(target, speculative, device=options.device or "auto", max_batch=slots, max_context=context)
    used = runtime.device_choice.device
    gpu = ""
    if used.type == "cuda":
        import torch

        gpu = torch.cuda.get_device_name(used)
    facts.update(
        model="llama-8b" if options.write_llama else options.model,
        weights="random" if options.write_llama else "published",
        device=str(used),
        gpu=gpu,
        num_speculative_tokens=runtime.num_speculative_tokens,
    )
    return RuntimeEngine(runtime)
