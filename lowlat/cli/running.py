"""Loading a runtime and running one request in it, with bars on the terminal: what demo, generate and doctor share."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lowlat.cli.console import Update, loading_bar, progress_bar
from lowlat.cli.generation import Generation
from lowlat.errors import RequestError
from lowlat.executors.devices import leave_a_core
from lowlat.host.runtime import Runtime
from lowlat.models.target import read_model_config
from lowlat.options.config import RuntimeConfig, SpeculativeConfig
from lowlat.options.request import SamplingParams, StepOutput
from lowlat.text import TextCodec

__all__ = ["Generation", "chat_ids", "default_context", "load_runtime", "run_request"]

LONG_PREFILLS = 2  # a shorter prompt is done before a bar could be read


def default_context(model: Path, wanted: int | None) -> int:
    """The context asked for, or the usual one where the model has room for it. Raises ConfigError."""
    if wanted is not None:
        return wanted
    return min(RuntimeConfig.max_context, read_model_config(model).max_position)


def load_runtime(
    model: Path, speculative: SpeculativeConfig | None, max_context: int | None, **options: Any
) -> Runtime:
    """Load a runtime behind a bar of its bytes and, on a GPU, one of its graphs. Raises ConfigError."""
    leave_a_core()
    context = default_context(model, max_context)
    with ExitStack() as bars:
        update = bars.enter_context(loading_bar(f"loading {model.name}"))
        graphs: list[Update | None] = []

        def captured(done: int, total: int) -> None:
            if not graphs:  # the first bar makes room for the second
                bars.close()
                graphs.append(bars.enter_context(progress_bar("capturing graphs")))
            if graphs[0] is not None:
                graphs[0](done, total)

        return Runtime.load(model, speculative, progress=update, captured=captured, max_context=context, **options)


def chat_ids(
    codec: TextCodec | None, user: str, system: str | None = None, *, allow_special: bool = False
) -> list[int]:
    """Token ids of a user's message in the model's chat template. Raises RequestError where there is none."""
    if codec is None:
        raise RequestError("a chat needs tokenizer.json in the model directory; give token ids")
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": user})
    return codec.encode_chat(messages, allow_special=allow_special)


def run_request(
    runtime: Runtime,
    prompt: Sequence[int] | str,
    params: SamplingParams,
    on_output: Callable[[StepOutput], None] | None = None,
    *,
    allow_special: bool = False,
) -> Generation:
    """Run one request to its end, handing on what each step brings; a long prefill has a bar."""
    name = runtime.submit(prompt, params, allow_special=allow_special)
    generation = Generation()
    for output in _prefill(runtime, runtime.metrics(name).prompt_tokens):
        _take(output, generation, on_output)
    while runtime.busy:
        for output in runtime.step():
            _take(output, generation, on_output)
    generation.record = runtime.metrics(name)
    generation.metrics = generation.record.to_dict()
    return generation


def _take(output: StepOutput, generation: Generation, on_output: Callable[[StepOutput], None] | None) -> None:
    generation.add(output)
    generation.error = output.error
    if on_output is not None:
        on_output(output)


def _prefill(runtime: Runtime, num_tokens: int) -> list[StepOutput]:
    """Step until the first output of a runtime's only request, as many chunks a step as run together."""
    most = runtime.geometry.prefill_sizes[-1]
    if num_tokens <= LONG_PREFILLS * most:
        return []
    with progress_bar("prefill") as update:
        done = 0
        while runtime.busy:
            outputs = runtime.step()
            if outputs:
                return outputs
            done = min(done + most, num_tokens)
            if update is not None:
                update(done, num_tokens)
    return []
