"""This module adapts a Runtime to the server's Engine protocol: it converts parameters, and figures to JSON."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import UNSET

from lowlat.engine.runtime import Runtime
from lowlat.errors import CapacityError
from lowlat.ipc.engine import EngineInfo
from lowlat.ipc.wire import Sampling
from lowlat.options.model_names import display_name
from lowlat.options.request import SamplingParams, StepOutput

__all__ = ["RuntimeEngine", "sampling_params"]


def sampling_params(sampling: Sampling) -> SamplingParams:
    """Convert a request's sampling to SamplingParams, which has the same names, and lowlat's defaults for fields that
    are unset. Raises RequestError."""
    given = {name: getattr(sampling, name) for name in Sampling.__struct_fields__}
    return SamplingParams(**{name: value for name, value in given.items() if value is not UNSET})


class RuntimeEngine:
    """Implements `lowlat.ipc.engine.Engine` with a Runtime, and closes it in the end.

    name      the model's name for clients; None: the name of its directory or repository
    defaults  values of sampling fields that a request leaves out; None: lowlat's own
    A call from another thread than the last one hands the runtime to that thread.
    """

    def __init__(self, runtime: Runtime, name: str | None = None, defaults: Mapping[str, float] | None = None) -> None:
        self._runtime = runtime
        self._owner = threading.get_ident()
        codec = runtime.codec
        if runtime.checks.has_masks:
            runtime.grammars.warm()  # otherwise the first request with a grammar would delay others' steps
        if codec is not None:
            _ = codec.cuts  # computed now, as the first growing prompt would delay steps, too
        self.info = EngineInfo(
            model=display_name(runtime.directory) if name is None else name,
            vocab_size=runtime.model_config.vocab_size,
            max_running=runtime.config.max_batch,
            max_context=runtime.config.max_context,
            tokenizer="" if codec is None else codec.fingerprint,
            has_chat_template=codec is not None and codec.has_chat_template,
            num_speculative_tokens=runtime.num_speculative_tokens,
            numerics=runtime.numerics,
            on_device=runtime.device_choice.device.type == "cuda",
            sampling_defaults={} if defaults is None else dict(defaults),
            can_sleep=runtime.config.can_sleep,
        )

    def validate(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Refuse a request that can never be served; any thread may call it. Raises RequestError."""
        self._runtime.checks.check(prompt, sampling_params(sampling))

    def compile(self, sampling: Sampling, patience_s: float | None) -> object:
        """Compile a request's grammar; None if it takes longer than patience_s. Any thread may call it. Raises
        RequestError."""
        return self._runtime.grammars.compile(sampling_params(sampling), patience_s)

    def submit(
        self, request_id: str, prompt: Sequence[int], sampling: Sampling, cache_salt: str = "", session: str = ""
    ) -> None:
        """Take a request. Raises RequestError, CapacityError."""
        params = self._compiled(sampling)
        self._runtime.submit(prompt, params, request_id=request_id, cache_salt=cache_salt, session=session or None)

    def open_prompt(
        self,
        request_id: str,
        sampling: Sampling,
        cache_salt: str = "",
        session: str = "",
        max_prompt_tokens: int | None = None,
    ) -> None:
        """Take a request whose prompt is still being written. Raises RequestError, CapacityError."""
        params = self._compiled(sampling)
        self._runtime.open_prompt(
            params,
            request_id=request_id,
            cache_salt=cache_salt,
            session=session or None,
            max_prompt_tokens=max_prompt_tokens,
        )

    def grow_prompt(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Add token ids to an open prompt, see `OpenPrompt.append`. Raises RequestError."""
        self._adopt()
        self._runtime.grow_prompt(request_id, token_ids)

    def finish_prompt(self, request_id: str, token_ids: Sequence[int], *, speculative: bool = False) -> None:
        """End an open prompt with these token ids, see `OpenPrompt.finish`. Raises RequestError."""
        self._adopt()
        self._runtime.finish_prompt(request_id, token_ids, speculative=speculative)

    def _compiled(self, sampling: Sampling) -> SamplingParams:
        """Convert a request's sampling in the thread that steps. Raises CapacityError if its grammar was dropped."""
        self._adopt()
        params = sampling_params(sampling)
        if not self._runtime.grammars.has(params):
            raise CapacityError(f"{params.grammar_option}: its compiled grammar was let go of meanwhile; try again")
        return params

    def cancel(self, request_id: str) -> None:
        """End a request; its output in the next step says so. Raises RequestError for an unknown request."""
        self._adopt()
        self._runtime.cancel(request_id)

    def pause(self, request_id: str) -> bool:
        """Take a request off its slot, see `Runtime.pause`. Raises RequestError, CapacityError."""
        self._adopt()
        return self._runtime.pause(request_id)

    def resume(self, request_id: str) -> None:
        """Let a paused request continue. Raises RequestError for a request that is not paused."""
        self._adopt()
        self._runtime.resume(request_id)

    @property
    def deadline(self) -> float | None:
        """The time at which a paused request will have waited for too long; None: no request is paused."""
        return self._runtime.deadline

    @property
    def busy(self) -> bool:
        """Whether a step would do anything now."""
        return self._runtime.ready

    def watch(self, wake: Callable[[], None]) -> None:
        """Set a function to call when `busy` may have become true by itself."""
        self._runtime.watch(wake)

    def step(self) -> list[StepOutput]:
        """Run one decode step for all running requests. Raises DeviceError when the device has failed."""
        self._adopt()
        return self._runtime.step()

    def metrics(self, request_id: str) -> Mapping[str, Any]:
        """Return a request's figures, with `eagle_speculation` if speculation ran. Raises RequestError."""
        return self._runtime.metrics(request_id).to_dict()

    def stats(self) -> Mapping[str, Any]:
        """Return totals since the load, KV use, and the slots.

        It is `runtime.summary()` with max_slots, slots (`Runtime.slots`), and num_queued: requests in the runtime that
        wait for a slot or for KV blocks.
        """
        runtime = self._runtime
        return {
            **runtime.summary(),
            "max_slots": runtime.config.max_batch,
            "slots": runtime.slots(),
            "num_queued": runtime.scheduler.num_queued,
        }

    def sleep(self) -> None:
        """Give the device's memory back, until `wake`. See `Runtime.sleep`."""
        self._adopt()
        self._runtime.sleep()

    def wake(self) -> None:
        """Take the device's memory again. See `Runtime.wake`."""
        self._adopt()
        self._runtime.wake()

    def close(self) -> None:
        """Release the device and all memory."""
        self._adopt()
        self._runtime.close()

    def _adopt(self) -> None:
        if self._owner != threading.get_ident():
            self._owner = threading.get_ident()
            self._runtime.adopt_thread()
