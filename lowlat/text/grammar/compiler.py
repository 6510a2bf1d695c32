"""This module compiles the grammars of one model: it tries them in an isolated process, and caches them."""

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from lowlat.errors import RequestError
from lowlat.options.request import SamplingParams
from lowlat.text.codec import TextCodec
from lowlat.text.grammar.exact import NotHeld, exact_text
from lowlat.text.grammar.matching import MatchedGrammar
from lowlat.text.grammar.reasoning import gate_of
from lowlat.text.grammar.refusals import reworded
from lowlat.text.grammar.spec import GrammarSpec, spec_of
from lowlat.text.grammar.tool_calls import tool_grammar
from lowlat.text.grammar.trial import MAX_MEMORY_BYTES, Refused, TooLong, Trials
from lowlat.text.grammar.vocabulary import Vocabulary, is_installed
from lowlat.text.harmony import HarmonyParser
from lowlat.text.schemas import Steps

if TYPE_CHECKING:
    import llguidance

__all__ = ["MAX_COMPILE_S", "GrammarCompiler"]

MAX_COMPILE_S = 1.0  # of the trial; the second time, here, takes as long: a grammar is served or refused within 2 s
MAX_GRAMMARS = 64
TOKEN_BY_NUMBER = "<["  # how a grammar's rules begin to name one


class Compiled:
    """A compiled grammar, kept at least as long as somebody holds it.

    matcher  at its beginning: copies are taken
    is_text  it names no token by its number
    """

    def __init__(self, matcher: "llguidance.LLMatcher", *, is_text: bool) -> None:
        self.matcher = matcher
        self.is_text = is_text


class GrammarCompiler:
    """Compiles what requests ask for. Safe for several threads; one grammar's compilation holds up no other.

    codec          of the model, None for one without a tokenizer
    vocab_size     of the model, which may be padded beyond its tokenizer
    eos_token_ids  the model's own end tokens
    """

    def __init__(
        self,
        codec: TextCodec | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        max_compile_s: float = MAX_COMPILE_S,
    ) -> None:
        self._max_compile_s = max_compile_s
        self._codec = codec
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._lock = threading.Lock()  # of the cache
        self._making = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._trials: Trials | None = None
        self._grammars: OrderedDict[GrammarSpec, Compiled | RequestError] = OrderedDict()
        self._held: weakref.WeakValueDictionary[GrammarSpec, Compiled] = weakref.WeakValueDictionary()

    def warm(self) -> None:
        """Make what the first grammar needs, where one can be served: tables of the vocabulary, and the process."""
        if self._codec is not None and self._eos_token_ids and is_installed():
            self._ready()

    def has(self, params: SamplingParams) -> bool:
        """Whether `open` answers at once."""
        spec = spec_of(params)
        return spec is None or spec in self._grammars or spec in self._held

    def compile(self, params: SamplingParams, patience_s: float | None = None) -> object:
        """Make the grammar of a request ready, where it has one; None where that takes longer than patience_s.

        While the caller holds the result, the grammar stays ready, however many others come meanwhile.
        Raises RequestError for one that cannot be served, naming what is wrong or which limit it breaks.
        """
        spec = spec_of(params)
        return True if spec is None else self._find(spec, patience_s)

    def open(self, params: SamplingParams, prompt: Sequence[int], stop_ids: Sequence[int]) -> MatchedGrammar | None:
        """A request at the beginning of its grammar; None where it has none.

        prompt    token ids, whose end says whether the model reasons first
        stop_ids  the request's end tokens, the model's own included
        Compiles what `compile` has not. Raises RequestError.
        """
        spec = spec_of(params)
        found = None if spec is None else self._find(spec, None)
        if spec is None or found is None:
            return None
        vocabulary, codec, _ = self._ready()
        # Harmony's calls lie in channels of their own, which their grammar has
        in_channels = spec.kind == "tool_calls" and HarmonyParser.speaks(codec)
        gate = None if in_channels else gate_of(codec, prompt, parsed=params.parse != "none")
        used_up = partial(self._forget, spec, found)
        # a stop token that is text ends a request, and no document: after one it would be part of the answer
        ends = [token for token in stop_ids if token in self._eos_token_ids or vocabulary.is_no_text(token)]
        return MatchedGrammar(vocabulary, found.matcher.deep_copy(), ends, gate, used_up, is_text=found.is_text)

    def _forget(self, spec: GrammarSpec, compiled: Compiled) -> None:
        """Let a grammar be compiled again: copies of this one's matcher can do nothing any more."""
        with self._lock:
            if self._grammars.get(spec) is compiled:
                del self._grammars[spec]
            if self._held.get(spec) is compiled:
                del self._held[spec]

    def _keep(self, spec: GrammarSpec, found: Compiled | RequestError) -> None:
        """Put a grammar, or why it is none, last in the cache; the lock is taken."""
        self._grammars[spec] = found
        self._grammars.move_to_end(spec)
        if isinstance(found, Compiled):
            self._held[spec] = found
        while len(self._grammars) > MAX_GRAMMARS:
            self._grammars.popitem(last=False)

    def _find(self, spec: GrammarSpec, patience_s: float | None) -> Compiled | None:
        """A grammar, compiled where it is neither cached nor held; None where that takes longer than patience_s."""
        with self._lock:
            found = self._grammars.get(spec) or self._held.get(spec)
            if found is not None:
                self._keep(spec, found)
        if found is None:
            most_s = self._max_compile_s
            limit_s = most_s if patience_s is None else min(patience_s, most_s)
            try:
                found = self._compile(spec, limit_s)
            except TooLong:
                if limit_s < most_s:
                    return None
                # not kept: on a machine that was busy, it may do better the next time
                raise RequestError(
                    f"{spec.kind}: it takes more than {most_s:g} s, or {MAX_MEMORY_BYTES >> 20} MiB, to compile"
                ) from None
            except RequestError as error:
                found = RequestError(str(error))  # without its frames
            with self._lock:
                self._keep(spec, found)
        if isinstance(found, RequestError):
            raise RequestError(str(found))
        return found

    def _compile(self, asked: GrammarSpec, limit_s: float) -> Compiled:
        vocabulary, codec, trials = self._ready()
        spec = asked
        if spec.kind == "tool_calls":
            spec = GrammarSpec(spec.kind, tool_grammar(codec, spec.text))
        elif spec.kind == "json_schema":
            try:
                spec = GrammarSpec(spec.kind, exact_text(spec.text))
            except NotHeld as error:
                raise RequestError(f"{spec.kind}: {error}") from None
        names_tokens = spec.kind in ("grammar", "tool_calls") and TOKEN_BY_NUMBER in spec.text
        end = time.monotonic() + limit_s
        try:
            grammar = trials.run(spec, limit_s)
        except Refused as error:
            is_last = limit_s >= self._max_compile_s
            raise reworded(str(error), asked, spec, partial(_overlapping, trials, end, is_last=is_last)) from None
        return Compiled(vocabulary.matcher(grammar), is_text=not names_tokens)

    def close(self) -> None:
        """End the other process; a later grammar starts it again."""
        with self._making:
            if self._trials is not None:
                self._trials.close()

    def _ready(self) -> tuple[Vocabulary, TextCodec, Trials]:
        with self._making:
            if self._codec is None:
                raise RequestError("structured output needs tokenizer.json in the model directory")
            if not self._eos_token_ids:
                raise RequestError("structured output needs eos_token_id in the model's config")
            if self._vocabulary is None or self._trials is None:
                self._vocabulary = Vocabulary(self._codec, self._vocab_size, self._eos_token_ids[0])
                self._trials = Trials(self._vocabulary)
                self._trials.start()
            return self._vocabulary, self._codec, self._trials


def _overlapping(trials: Trials, end: float, schema: str, paths: Sequence[Steps], *, is_last: bool) -> Steps | None:
    """The first path whose `oneOf` the library does not take; None where it cannot be told by `end`.

    is_last  no other try has more time. Raises TooLong where one has.
    """
    limit_s = end - time.monotonic()
    try:
        if limit_s <= 0.0:
            raise TooLong
        return trials.overlapping(schema, paths, limit_s)
    except TooLong:
        if is_last:
            return None
        raise
