"""An engine whose answers are walks through the masks of their requests' grammars, taken apart as a Runtime does."""

from collections.abc import Sequence
from typing import Any

from fake_engine import FakeOutput
from gateway import ScriptedEngine
from grammars import END, codec_with, compiler_of, walk

from lowlat.ipc.wire import Sampling, ToolCallDelta
from lowlat.serving.engine import sampling_params
from lowlat.text import AnswerStream

__all__ = ["GrammarEngine"]


class GrammarEngine(ScriptedEngine):
    """Answers requests with a grammar by a walk, all of it in one step, and others as its base does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.codec = codec_with("<tool_call>", "</tool_call>")
        self.compiler = compiler_of(self.codec)
        self.answers: dict[str, list[int]] = {}

    def compile(self, sampling: Sampling, patience_s: float | None) -> object:
        """Make the grammar of a request ready."""
        return self.compiler.compile(sampling_params(sampling), patience_s)

    def submit(
        self, request_id: str, prompt: Sequence[int], sampling: Sampling, cache_salt: str = "", session: str = ""
    ) -> None:
        """Take a request."""
        super().submit(request_id, prompt, sampling, cache_salt, session)
        params = sampling_params(sampling)
        for seed in range(10 if params.grammar_option else 0):
            state = self.compiler.open(params, (1,), (END,))
            assert state is not None
            tokens = walk(state, self.codec, seed)
            if tokens is not None:
                self.answers[request_id] = tokens
                break

    def _advance(self, request_id: str, request: Any) -> FakeOutput:
        if request_id not in self.answers:
            return super()._advance(request_id, request)
        tokens = (*self.answers.pop(request_id), END)
        request.num_sent += len(tokens)
        self._end(request_id, self._running.pop(request_id))
        stream = AnswerStream(self.codec, request.sampling.parse)
        deltas = (stream.push(tokens), stream.finish())
        return FakeOutput(
            request_id,
            tokens,
            "stop",
            text="".join(delta.text for delta in deltas),
            tool_calls=tuple(
                ToolCallDelta(call.index, call.arguments, call.id, call.name)
                for delta in deltas
                for call in delta.tool_calls
            ),
        )
