"""SpecPV's tokens and distributions next to those of full attention, on texts, by context and budget.

    python -m bench.experiments.specpv agreement --texts held_out.json.xz --context 512 1024 --retrieval 8 16 --out FILE
    python -m bench.experiments.specpv agreement --pair chat --target DIR --draft-model lowlat/demo/chat_head --chat \\
        --texts held_out.json.xz --context 1024 2048 --retrieval 8 24 64 --limit 3 --out FILE

A text is continued twice from the same prompt, by full attention and by SpecPV. `equal_share` is the share of tokens
that are the same at the same place, and `first_difference` the place of each text's first other token, None where all
are equal. Texts that have parted say little of one step, so full attention is led along SpecPV's own text besides: at
each place both have then read the same prefix, and `same_choice` is the share of places with the same likeliest token,
`mean_kl`, `p99_kl` and `max_kl` the divergence of SpecPV's distribution from full attention's, in nats. The first token
comes out of prefill and is in `equal_share` alone. The budget is `listed_positions`, which a partial step attends to at
least. Trained weights, nothing is simulated.

Texts are JSON of name -> text, such as `bench.training.long_texts` holds out; without `--texts` the bundled prompts
stand one after the other. Contexts end at the same place of a text, less room for what follows, whatever their length;
with `--chat` an excerpt and a question stand in the model's chat template. Steps run in the reference executor on a
CPU, in the eager one on a GPU: every executor gives the same tokens. Times are of no interest here.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.acceptance import conditions_of, given_prompt, runs_on, text_loops, write_result
from bench.experiments.specpv_report import agreement_table
from bench.training.long_texts import read_texts, spread
from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.graphs.program import Op
from lowlat.text import TextCodec
from lowlat.tools.quality import Sums

__all__ = ["DEMO", "Budget", "Drawn", "agreement", "bundled_text", "draw", "main"]

DEMO = Path(__file__).parents[2] / "lowlat" / "demo"
QUESTION = "What is this text about? Answer in a few sentences."


@dataclass(frozen=True)
class Drawn:
    """One completion: its tokens, the logits [V] float32 that each but the first was drawn from, and its figures."""

    tokens: list[int]
    logits: list[torch.Tensor]
    partial_steps: int
    accepted: int
    drafts: int


def draw(runtime: Runtime, prompt: Sequence[int], params: SamplingParams, text: Sequence[int] | None = None) -> Drawn:
    """Run one request alone, and keep the logits of its tokens.

    text  a completion that the request is led along without drafts: it takes these tokens, whatever it would draw
    """
    recorder = _Recorder(None if text is None else [*prompt, *text])
    runtime.executor.set_hook(recorder)
    name = runtime.submit(prompt, params)
    tokens: list[int] = []
    while runtime.busy:
        for output in runtime.step(None if text is None else 0):
            if output.error is not None:
                raise SystemExit(f"a text failed: {output.error}")
            tokens += output.token_ids
    runtime.executor.set_hook(None)
    runtime.executor.synchronize()
    figures = runtime.metrics(name)
    stats = figures.speculation
    counts = (0, 0) if stats is None else (stats.total_accepted_tokens, stats.num_drafts)
    first = len(prompt) + 1
    logits = [recorder.logits[place] for place in range(first, len(prompt) + len(tokens))]
    return Drawn(tokens, logits, figures.num_partial_steps, *counts)


class _Recorder:
    """A hook that keeps the logits of each token of one request by its place, and may say what tokens are drawn.

    text  prompt and completion that are given in place of what is drawn; None: the draws stand
    """

    def __init__(self, text: Sequence[int] | None) -> None:
        self._text = text
        self._last = torch.empty(0)
        self.logits: dict[int, torch.Tensor] = {}

    def __call__(self, op: Op, arguments: Mapping[str, torch.Tensor]) -> None:
        if op.kind == "sample":
            self._last = arguments["logits"]
            if self._text is not None:
                place = int(arguments["lengths"][int(arguments["slots"][0])])
                if place < len(self._text):
                    arguments["target_tokens"].fill_(self._text[place])
        elif op.kind == "publish":
            slot, count = int(arguments["slots"][0]), int(arguments["commit_lens"][0])
            begin = int(arguments["lengths"][slot]) - count
            for step, node in enumerate(arguments["accepted_nodes"][0, :count].tolist()):
                self.logits[begin + step] = self._last[node].clone()


def agreement(found: Sequence[Sequence[int]], full: Sequence[Sequence[int]]) -> tuple[float, list[int | None]]:
    """The share of tokens that are the same by place, and the place of each text's first other token; None: none."""
    equal = [[a == b for a, b in zip(mine, theirs, strict=True)] for mine, theirs in zip(found, full, strict=True)]
    firsts = [row.index(False) if False in row else None for row in equal]
    return sum(map(sum, equal)) / sum(map(len, equal)), firsts


def bundled_text(codec: TextCodec, length: int, number: int) -> list[int]:
    """So many tokens of the bundled prompts, one after the other, each number from another one on."""
    texts = [text for kind in json.loads((DEMO / "prompts.json").read_text()).values() for text in kind]
    place, tokens = 7 * number % len(texts), list[int]()
    while len(tokens) < length:
        tokens += codec.encode(texts[place % len(texts)])
        place += 1
    return tokens[:length]


@dataclass
class Budget:
    """A runtime with SpecPV, and what its texts of one context gave."""

    options: dict[str, Any]
    runtime: Runtime
    found: list[Drawn] = field(default_factory=list)
    full: list[Drawn] = field(default_factory=list)
    sums: Sums = field(default_factory=lambda: Sums(2))

    def add(self, prompt: Sequence[int], params: SamplingParams, full: Drawn, whole: Runtime) -> None:
        """Continue a prompt that full attention has continued, and lead that along what is found."""
        found = draw(self.runtime, prompt, params)
        led = full if found.tokens == full.tokens else draw(whole, prompt, params, found.tokens)
        self.sums.add([torch.stack(found.logits), torch.stack(led.logits)], found.tokens[1:])
        self.found.append(found)
        self.full.append(full)

    def row(self) -> dict[str, Any]:
        """The figures of all texts; the next context begins again."""
        sizes = self.runtime.geometry.partial
        if sizes is None:
            raise SystemExit("the runtime has no SpecPV: its draft model does not fit")
        share, firsts = agreement([each.tokens for each in self.found], [each.tokens for each in self.full])
        divergence = self.sums.divergence()
        row = {
            **self.options,
            "listed_positions": (sizes.num_sinks + sizes.num_retrieved + sizes.num_window) * sizes.block,
            "texts": len(self.found),
            "places": self.sums.count,
            "partial_steps": sum(each.partial_steps for each in self.found),
            "equal_share": round(share, 4),
            "first_difference": firsts,
            "first_difference_median": median(
                len(each.tokens) if first is None else first for each, first in zip(self.found, firsts, strict=True)
            ),
            "texts_equal": firsts.count(None),
            "same_choice": round(divergence.top1_agreement, 4),
            "mean_kl": float(f"{divergence.mean_kl:.4g}"),
            "p99_kl": float(f"{divergence.p99_kl:.4g}"),
            "max_kl": float(f"{divergence.max_kl:.4g}"),
            "accept_length": _accept_length(self.found),
            "accept_length_of_full": _accept_length(self.full),
            "looping": sum(text_loops(each.tokens) for each in self.full),
        }
        self.found, self.full, self.sums = [], [], Sums(2)
        return row


def _accept_length(runs: Sequence[Drawn]) -> float:
    return round(1 + sum(each.accepted for each in runs) / max(1, sum(each.drafts for each in runs)), 3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a row for each context and budget, and write after each context what there is so far."""
    options = _options(arguments)
    rows: list[dict[str, Any]] = []
    end = time.monotonic() + 60 * options.minutes
    conditions = {
        **conditions_of(options),
        "pair": options.pair,
        "draft_model": options.draft_model.name,
        "draft_window": options.draft_window,
        "num_speculative_tokens": options.depth,
        "chat": options.chat,
        "place": options.place,
    }
    with ExitStack() as stack:
        whole = stack.enter_context(_load(options, {}))
        conditions |= {"runs_on": runs_on(whole), "dtype": whole.model_config.dtype}
        settings = [_specpv(options, retrieval) for retrieval in options.retrieval]
        budgets = [Budget(each, stack.enter_context(_load(options, each))) for each in settings]
        for context in options.context:
            if time.monotonic() > end:
                break
            for row in _rows(whole, budgets, context, options):
                rows.append(row)
                print(json.dumps(row), flush=True)
            left_out = [each for each in options.context if each > context]
            write_result(options.out, {"conditions": conditions, "rows": rows, "left_out": left_out})
    print("\n".join(agreement_table(rows)))
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.experiments.specpv agreement",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pair", default="bundled", help="the name that rows bear")
    parser.add_argument("--target", type=Path, default=DEMO / "target")
    parser.add_argument("--draft-model", type=Path, default=DEMO / "head")
    parser.add_argument("--draft-window", type=int, help="positions that the draft model sees; its own by default")
    parser.add_argument("--texts", type=Path, help="JSON: name -> text; .xz is read too; by default bundled prompts")
    parser.add_argument("--limit", type=int, default=8, help="texts, of all evenly")
    parser.add_argument("--chat", action="store_true", help=f"ask of an excerpt in the chat template: {QUESTION!r}")
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 2048], help="positions, text included")
    parser.add_argument("--place", type=int, help="the token of a text where contexts end; the largest by default")
    parser.add_argument("--retrieval", type=int, nargs="+", default=[8, 16, 32], help="blocks that each head chooses")
    parser.add_argument("--refresh", type=int, default=32, help="partial steps between refreshes")
    parser.add_argument("--threshold", type=int, default=0, help="tokens from which on steps are partial, at least")
    parser.add_argument("--depth", type=int, default=3, help="S")
    parser.add_argument("--max-tokens", type=int, default=96, help="that follow each prompt")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no other context is begun")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    options.context = sorted(options.context)
    options.place = options.place or options.context[-1]
    if options.place < options.context[-1]:
        parser.error(f"--place {options.place} is below the largest --context, {options.context[-1]}")
    if options.context[0] <= _room(options):
        parser.error(f"--context {options.context[0]} leaves no prompt before --max-tokens {options.max_tokens}")
    return options


def _room(options: argparse.Namespace) -> int:
    """Positions of a context that its prompt leaves free: for the completion, and for drafts after it."""
    room: int = options.max_tokens + options.depth + 1
    return room


def _specpv(options: argparse.Namespace, retrieval: int) -> dict[str, Any]:
    return {
        "enable_specpv": True,
        "specpv_n_retrieval_blocks": retrieval,
        "specpv_full_refresh_steps": options.refresh,
        "specpv_partial_threshold": options.threshold,
    }


def _load(options: argparse.Namespace, specpv: dict[str, Any]) -> Runtime:
    config = SpeculativeConfig(
        model=options.draft_model,
        draft_window=options.draft_window,
        num_speculative_tokens=options.depth,
        strict=True,
        **specpv,
    )
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    hooks = {"executor": "reference"} if device == "cpu" else {"executor": "eager", "fuse": False}
    sizes = {"max_batch": 1, "max_context": options.context[-1], "prompt_logprobs": False}
    return Runtime.load(options.target, config, device=device, dtype=options.dtype, **hooks, **sizes)


def _rows(
    whole: Runtime, budgets: Sequence[Budget], context: int, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """The rows of one context, of every temperature and budget."""
    for temperature in options.temperature:
        start = time.perf_counter()
        params = SamplingParams(max_tokens=options.max_tokens, temperature=temperature, seed=1, ignore_eos=True)
        for text in _texts(whole, options):
            prompt = _prompt(whole, text, context - _room(options), chat=options.chat)
            full = draw(whole, prompt, params)
            for budget in budgets:
                budget.add(prompt, params, full, whole)
        seconds = round(time.perf_counter() - start, 1)
        for budget in budgets:
            own = {"pair": options.pair, "context": context, "temperature": temperature}
            yield {**own, "lossy": True, "simulated": False, **budget.row(), "s_of_context": seconds}


def _texts(runtime: Runtime, options: argparse.Namespace) -> Iterator[list[int]]:
    """The tokens of each text up to the place where prompts end."""
    if runtime.codec is None:
        raise SystemExit(f"{options.target} has no tokenizer")
    end = options.place - _room(options)
    if options.texts is None:
        yield from (bundled_text(runtime.codec, end, number) for number in range(options.limit))
        return
    for name, text in spread(list(read_texts(options.texts).items()), options.limit):
        tokens = runtime.codec.encode(text, add_special_tokens=False)
        if len(tokens) < end:
            raise SystemExit(f"the text {name!r} has {len(tokens)} tokens, and prompts end at {end} (--place)")
        yield tokens[:end]


def _prompt(runtime: Runtime, text: Sequence[int], length: int, *, chat: bool) -> list[int]:
    """A prompt of so many tokens that ends where the text does; in a chat it is an excerpt and a question, and may be
    a few tokens shorter."""
    if not chat or runtime.codec is None:
        return list(text[-length:])
    taken = length
    while taken > 0:
        excerpt = runtime.codec.decode(text[-taken:])
        prompt = [int(token) for token in given_prompt(runtime, f"{excerpt}\n\n{QUESTION}", chat=True)]
        if len(prompt) <= length:
            return prompt
        taken -= len(prompt) - length
    raise SystemExit(f"a prompt of {length} tokens has no room for a text next to the question")
