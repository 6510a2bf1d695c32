"""A runtime loads models once, and then answers prompts. It owns weights, buffers and the KV pool.

One thread owns a runtime. It is either the program's thread, which calls `submit` and `step` (`lowlat.engine.stepped`),
or the driver's (`lowlat.engine.calls.driver`), which answers calls from any thread and event loop.
"""

from __future__ import annotations  # help() shows signatures as they are written here

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn, Self, Unpack

from lowlat.engine.calls.choices import answer_choices
from lowlat.engine.calls.driver import Driver, owned
from lowlat.engine.calls.prompts import as_chat, check_timeout, is_quick, prepare
from lowlat.engine.calls.streams import AsyncStream, Stream
from lowlat.engine.loading.loading import load
from lowlat.engine.memory.plan import DeviceNeed
from lowlat.engine.sessions.session import Session, load_session, open_session
from lowlat.engine.stepped import SteppedRuntime
from lowlat.errors import CapacityError, LowlatError
from lowlat.executors.devices import make_current
from lowlat.ipc.answer import Answer
from lowlat.ipc.prompts import Prompt
from lowlat.models.target import OpenedTarget
from lowlat.options.directories import make_private
from lowlat.options.keywords import CallOptions, RuntimeOptions
from lowlat.options.model_names import display_name
from lowlat.options.request import SamplingParams
from lowlat.options.runtime import options_from
from lowlat.options.speculative import SpeculativeConfig

__all__ = ["Runtime"]

logger = logging.getLogger("lowlat.engine.runtime")


class Runtime(SteppedRuntime):
    """Decodes requests with one target, with speculation if a speculator is loaded.

    Use `Runtime.load`; as a context manager it closes itself. `generate`, `chat` and `stream`, and `agenerate`, `achat`
    and `astream` for asyncio, may be called from any thread or task, several at once. The first such call starts a
    thread that then owns the runtime. `submit` and `step` are for a program that runs this loop itself.

    codec               the tokenizer; None: there is none
    device_choice       its device and executor, and the reason
    memory              the memory that it holds there
    speculation_error   why a draft model is not used; None: it is used, or there is none
    speculation_limits  the sizes of speculation that were loaded, by option; `SpeculativeConfig.check` reads them
    numerics            the digest of everything that decides the bits of results, 16 hexadecimal digits: see
                        `lowlat.engine.numerics`
    checks              refuses requests; any thread may ask it
    grammars            compiles the grammars of requests; any thread may ask it
    """

    @classmethod
    def load(
        cls,
        model: str | Path | OpenedTarget,
        speculative: SpeculativeConfig | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        captured: Callable[[int, int], None] | None = None,
        downloaded: Callable[[int, int], None] | None = None,
        reserve: Callable[[Sequence[DeviceNeed]], None] | None = None,
        **options: Unpack[RuntimeOptions],
    ) -> Self:
        """Load a model and, with `speculative`, a speculator.

        model       a Hugging Face directory, or `ORG/NAME[@REVISION]` of a repository, which is downloaded into the
                    hub's cache; or an `OpenedTarget`
        progress    called with bytes read and bytes in all
        captured    called with graphs captured and graphs in all, if the executor captures
        downloaded  called with bytes fetched and bytes in all, for each repository; None: huggingface_hub's own bars
        reserve     called before memory is taken, with the bytes needed and free of each device: it may wait until
                    others have freed memory
        options     fields of RuntimeConfig: max_batch, max_context, dtype, device, ...
        Raises ConfigError for anything wrong with the directory, the draft model (under strict) or an option.
        """
        config = options_from(options)
        if config.cache_dir is not None:
            make_private(Path(config.cache_dir), "cache_dir")
        loaded = load(model, speculative, config, progress, captured, downloaded, reserve)
        try:
            runtime = cls(loaded, config)
        except BaseException:
            loaded.close()
            raise
        logger.info("numerics %s", runtime.numerics)
        return runtime

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[CallOptions]) -> Answer:
        """Answer a prompt, and return when the answer is complete: `runtime.generate("Once", max_tokens=32).text`.

        prompt   text, token ids, or a chat's messages: [{"role": "user", "content": "..."}, ...]
        params   sampling parameters; options given by name override its fields
        options  the fields of SamplingParams by name (max_tokens, temperature, stop, seed, json_schema, ...), and
                 tool_choice, template_options, allow_special, cache_salt, timeout_s: see CallOptions
        Messages go through the model's chat template, with `tools` if there are any. Their answer is parsed
        (`Answer.reasoning`, `Answer.tool_calls`) unless parse="none". Without params and max_tokens, the answer to
        messages has up to 4096 tokens, or what the context allows; the answer to other prompts has up to 256.
        Any thread may call, several at once; calls without a slot wait. Ctrl-C cancels the request.
        Raises RequestError for a request that cannot be served; StreamError, with the tokens so far, if the request
        fails, timeout_s passes or the runtime is closed; DeviceError when the device has failed.
        """
        with self._stream(prompt, params, options, each=False) as stream:
            return stream.answer()

    def chat(self, messages: Prompt, params: SamplingParams | None = None, **options: Unpack[CallOptions]) -> Answer:
        """Answer a chat: `runtime.chat("Who are you?").text`; `messages.append(answer.message)` continues it.

        messages  as in `generate`; a text is one message of the user
        The other arguments and errors are those of `generate`. `stream` takes messages, too.
        """
        return self.generate(as_chat(messages), params, **options)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[CallOptions]) -> Stream:
        """Answer a prompt chunk by chunk: `for chunk in runtime.stream("Once"): print(chunk.text, end="")`.

        The request begins at once. Leaving the stream before its end cancels it; `Stream.answer` reads the rest and
        returns the whole answer. Arguments and errors are those of `generate`.
        """
        return self._stream(prompt, params, options, each=True)

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> Answer:
        """Answer a prompt, in a coroutine; cancelling its task cancels the request. See `generate`."""
        async with self._astream(prompt, params, options, each=False) as stream:
            return await stream.answer()

    async def achat(
        self, messages: Prompt, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> Answer:
        """Answer a chat, in a coroutine. See `chat`."""
        return await self.agenerate(as_chat(messages), params, **options)

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> AsyncStream:
        """Answer chunk by chunk, in a coroutine: `async for chunk in runtime.astream("Once")`. See `stream`."""
        return self._astream(prompt, params, options, each=True)

    def choices(
        self,
        prompt: Prompt,
        n: int,
        params: SamplingParams | None = None,
        *,
        best_of: int | None = None,
        **options: Unpack[CallOptions],
    ) -> list[Answer]:
        """Answer a prompt n times; the prompt is prefilled once, and the answers share its KV.

        n        answers; each has a seed of its own, the first the given one
        best_of  answers that are made; the n likeliest by the mean logprob of their tokens are returned, the best first
        The other arguments and errors are those of `generate`. If one answer fails, the others are cancelled. A session
        continues from the first returned answer.
        """
        return answer_choices(self, prompt, n, best_of, params, options)

    def session(self, session_id: str, *, cache_salt: str = "", ttl_s: float | None = None) -> Session:
        """Open a session, or find the live one with this id: `runtime.generate(text, session=session)`.

        session_id  1 to 128 printable characters
        cache_salt  as in `submit`; sessions of different salts are different, even with one id
        ttl_s       its lifetime after its last request; None: session_ttl_s. Its prefix stays on the device, and in the
                    tiers of the cache, while other prefixes can be evicted
        Any thread may call. Raises RequestError for an invalid id or time.
        """
        self._check_open()
        return open_session(self, session_id, cache_salt, ttl_s)

    def load_session(
        self,
        path: str | Path,
        *,
        session_id: str | None = None,
        cache_salt: str = "",
        ttl_s: float | None = None,
        force: bool = False,
    ) -> Session:
        """Open a session that `Session.save` has written, here or in another process; it continues where it ended.

        session_id  its new name; None: the old one
        force       take only its tokens if its state does not fit, since it has another model's files or `numerics`;
                    the next request then prefills them again
        Raises SessionError, which says what is wrong: no session file, a torn or altered one, another model's, or other
        numerics. Raises RequestError for a name in use, or tokens that this model does not have.
        """
        self._check_open()
        return load_session(self, Path(path), session_id, cache_salt, ttl_s, force=force)

    @owned
    def sleep(self) -> None:
        """Free the device's memory of weights, KV and scratch until `wake`; harmless when repeated.

        Weights are copied to pinned host memory, and stay there: later sleeps copy nothing. Shared prefixes go to the
        tiers of the cache (host_cache_gib, cache_dir), and are found there after `wake`; without tiers they are lost.
        Graphs and their addresses stay. Requests are refused meanwhile.
        Raises ConfigError for a runtime without can_sleep; CapacityError while there are requests, or if the host has
        no memory for the weights, and the runtime then stays awake; DeviceError when the device has failed.
        """
        self._check_usable()
        if self._requests:
            raise CapacityError(f"{len(self._requests)} requests are not over: a runtime sleeps between requests")
        if self.sessions.num_files:
            raise CapacityError(f"{self.sessions.num_files} sessions are being saved: a runtime sleeps after that")
        self._sleep.sleep()

    @owned
    def wake(self) -> None:
        """Take the device's memory again, at the same addresses, with the weights; harmless when repeated.

        Raises CapacityError if others hold the device's memory: it stays asleep, and `wake` may be called again.
        Raises DeviceError when the device has failed.
        """
        self._check_usable()
        self._sleep.wake()

    def close(self) -> None:
        """Drop requests, buffers, KV and weights, and free their memory; harmless when repeated.

        Calls that wait for an answer get a StreamError with the code "closed".
        """
        if os.getpid() != self._process:
            return  # all of it is the other process's
        with self._closing:  # threads that close at once: all return when it is closed
            if self._closed:
                return
            if self.driver is not None:
                self.driver.stop()
                make_current(self.device_choice.device)
            self._closed = True
            self._requests.close()
            self._steps.close()
            del self._steps, self._between, self._sleep  # their views of the executor's buffers go, too
            if self.codec is not None:
                self.codec.close()
            self.executor.close()  # the last: a device that has failed says so

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise TypeError(
            "a Runtime cannot be copied or pickled: its weights and KV are a device's, and one thread steps it; load "
            "one in each process, or serve it (lowlat serve) and ask it with lowlat.ipc.Client"
        )

    def __repr__(self) -> str:
        name, depth = display_name(self.directory), self.num_speculative_tokens
        drafts = f", {self.speculator.method} S={depth}" if self.speculator is not None and depth else ""
        sizes = f"max_batch={self.config.max_batch}, max_context={self.config.max_context}"
        closed = ", closed" if self._closed else ""
        return f"Runtime({name!r}{drafts}, {sizes}, device={str(self.device_choice.device)!r}{closed})"

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream(self, prompt: Prompt, params: SamplingParams | None, options: CallOptions, *, each: bool) -> Stream:
        driver = self._driven()
        return Stream(driver, prepare(self, prompt, params, options), options.get("timeout_s"), each=each)

    def _astream(
        self, prompt: Prompt, params: SamplingParams | None, options: CallOptions, *, each: bool
    ) -> AsyncStream:
        check_timeout(options.get("timeout_s"))
        return AsyncStream(
            self._driven(),
            partial(prepare, self, prompt, params, options),
            options.get("timeout_s"),
            quick=is_quick(prompt, params, options),
            each=each,
        )

    def _driven(self) -> Driver:
        """The thread that owns the runtime, started by the first call."""
        self._check_open()
        with self._starting:
            if self.driver is None:
                self._check_usable()
                if self.busy:
                    raise LowlatError(
                        "requests that were submitted by hand are under way; step until they end before generate, "
                        "stream or chat, or let these do all of it"
                    )
                self.driver = Driver(self)
            return self.driver
