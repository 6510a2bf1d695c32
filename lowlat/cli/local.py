"""A model loaded in this process to chat with, the counterpart of a server's in `lowlat.cli.connecting`."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lowlat.cli.channels import ChannelWriter
from lowlat.cli.generation import Generation, Output
from lowlat.cli.running import step_outputs
from lowlat.engine.runtime import Runtime
from lowlat.ipc.limits import Limits
from lowlat.options.model_names import display_name
from lowlat.options.request import SamplingParams
from lowlat.text import HarmonyParser, parse_channels

__all__ = ["LocalModel"]


class LocalModel:
    """A runtime that answers one request after the other.

    advice  the sampling where a request leaves it open, next to lowlat's own defaults; None: these alone
    """

    def __init__(self, runtime: Runtime, advice: Mapping[str, int | float] | None = None) -> None:
        self._runtime = runtime
        self.advice = {} if advice is None else dict(advice)
        self.name = display_name(runtime.directory)
        self.place = str(runtime.device_choice.device)
        self.has_tokenizer = runtime.codec is not None
        self.has_chat_template = runtime.codec is not None and runtime.codec.has_chat_template

    def ask(self, prompt: str | list[dict[str, Any]], sampling: Mapping[str, Any]) -> "_LocalAsked":
        """A request for a text's continuation or a conversation's next message.

        A message without max_tokens may have what the context has room for, and the server's default_max_tokens at
        most.
        """
        codec = self._runtime.codec
        ids: Any = prompt
        options = {**self.advice, **sampling}
        if codec is not None and not isinstance(prompt, str):
            ids = codec.encode(codec.apply_chat_template(prompt), add_special_tokens=False)
            room = max(1, self._runtime.config.max_context - len(ids))
            most = max(Limits.default_max_tokens, options.get("min_tokens", 0))
            options.setdefault("max_tokens", min(room, most))
        return _LocalAsked(self._runtime, ids, SamplingParams.from_options(options))

    def writer(self, sampling: Mapping[str, Any]) -> Callable[[Any], None] | None:
        """How an answer is shown where it has channels; None: as it comes."""
        # a stop string may end within a token: its text is known, the channel's without it is not
        codec = self._runtime.codec
        if codec is None or sampling.get("stop") or not HarmonyParser.speaks(codec):
            return None
        return ChannelWriter(codec)

    def answer_of(self, generation: Generation) -> str:
        """The text that stays in the conversation: without a model's analysis."""
        messages = parse_channels(self._runtime.codec, generation.token_ids)
        if messages is None:
            return generation.text or ""
        return "\n".join(message.text for message in messages if message.channel in ("final", None))


class _LocalAsked:
    """One request; `generation` is its outcome so far, also where it was interrupted."""

    def __init__(self, runtime: Runtime, prompt: Any, params: SamplingParams) -> None:
        self.generation = Generation()
        self._runtime, self._prompt, self._params = runtime, prompt, params

    def run(self, on_output: Callable[[Output], None]) -> Generation:
        """Run the request to its end, handing on each output. Ctrl-C cancels it between steps. Raises RequestError."""
        runtime, generation = self._runtime, self.generation
        name = runtime.submit(self._prompt, self._params)
        with _held_interrupts() as interrupted:
            try:
                for output in step_outputs(runtime, name):
                    generation.add(output)
                    generation.error = output.error
                    on_output(output)
                    if interrupted.is_set():
                        raise KeyboardInterrupt
            except KeyboardInterrupt:
                if runtime.busy:
                    runtime.cancel(name)
                while runtime.busy:
                    runtime.step()
                raise
        generation.metrics = runtime.metrics(name).to_dict()
        return generation


@contextmanager
def _held_interrupts() -> Iterator[threading.Event]:
    """Ctrl-C sets an event and interrupts nothing: a step that is broken off leaves a runtime in no good state."""
    held = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    before = signal.signal(signal.SIGINT, lambda *_: held.set())
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, before)
