"""This module loads a runtime and runs one request in it, with bars on the terminal."""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from lowlat.cli.collection import rare_collections
from lowlat.cli.console import Update, progress_bar
from lowlat.cli.generation import Asked, Generation
from lowlat.cli.models import local_target
from lowlat.engine.memory.plan import DeviceNeed
from lowlat.engine.runtime import Runtime
from lowlat.errors import RequestError
from lowlat.executors.devices import leave_a_core
from lowlat.ipc.chunk import Chunk
from lowlat.models.target import read_model_config
from lowlat.options.model_names import display_name
from lowlat.options.request import SamplingParams
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.speculative import SpeculativeConfig
from lowlat.text import TextCodec

__all__ = ["Generation", "chat_ids", "default_context", "load_runtime", "run_request"]

LONG_PREFILLS = 2  # chunks; a shorter prompt is done before anyone could read a bar


def default_context(model: Path, wanted: int | None) -> int:
    """Return the context asked for, or the default, limited by the model's. Raises ConfigError."""
    if wanted is not None:
        return wanted
    return min(RuntimeConfig.max_context, read_model_config(model).usual_context)


class _Bars(ExitStack):
    """Shows one bar at a time: a new one replaces the last."""

    def __init__(self) -> None:
        super().__init__()
        self._description = ""
        self._update: Update | None = None

    def show(self, description: str, done: int, total: int | None, *, as_bytes: bool = True) -> None:
        """Show how far something is; its first call makes the bar."""
        if description != self._description:
            self.close()
            self._description, self._update = description, None
            self._update = self.enter_context(progress_bar(description, as_bytes=as_bytes))
        if self._update is not None:
            self._update(done, total)


@rare_collections()
def load_runtime(
    model: Path,
    speculative: SpeculativeConfig | None,
    max_context: int | None,
    *,
    reserve: Callable[[Sequence[DeviceNeed]], None] | None = None,
    **options: Any,
) -> Runtime:
    """Load a runtime, with bars for the bytes downloaded and read and, on a GPU, for its graphs.

    reserve  see `Runtime.load`
    Raises ConfigError.
    """
    leave_a_core()
    directory = local_target(model, options.get("dtype", "auto"))
    loading = f"loading {display_name(directory)}"
    with _Bars() as bars:
        bars.show(loading, 0, None)
        draft = "" if speculative is None else str(speculative.model)
        on_terminal = sys.stderr.isatty()
        return Runtime.load(
            directory,
            speculative,
            progress=partial(bars.show, loading),
            captured=partial(bars.show, "capturing graphs", as_bytes=False),
            downloaded=partial(bars.show, f"fetching {draft}") if on_terminal else None,
            max_context=default_context(directory, max_context),
            reserve=reserve,
            **options,
        )


def chat_ids(
    codec: TextCodec | None, user: str, system: str | None = None, *, allow_special: bool = False
) -> list[int]:
    """Token ids of a user's message in the model's chat template. Raises RequestError where there is none."""
    if codec is None:
        raise RequestError("a chat needs tokenizer.json in the model directory; give token ids, without --chat")
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": user})
    return codec.encode_chat(messages, allow_special=allow_special)


def run_request(
    runtime: Runtime,
    prompt: Sequence[int] | str,
    params: SamplingParams,
    on_chunk: Callable[[Chunk], None] | None = None,
    *,
    allow_special: bool = False,
) -> Generation:
    """Run one request to its end, handing on each chunk; a long prefill has a bar. Raises RequestError."""
    stream = runtime.stream(prompt, params, allow_special=allow_special)
    asked = Asked(stream, has_text=runtime.codec is not None, max_context=runtime.config.max_context)
    is_long = len(prompt) > LONG_PREFILLS * runtime.geometry.prefill_sizes[-1]
    with _Bars() as bars:
        if is_long:
            bars.show("prefill", 0, None)

        def hand_on(chunk: Chunk) -> None:
            bars.close()
            if on_chunk is not None:
                on_chunk(chunk)

        generation = asked.run(hand_on)
    generation.record = runtime.metrics(stream.request_id)
    generation.metrics = generation.record.to_dict()
    return generation
