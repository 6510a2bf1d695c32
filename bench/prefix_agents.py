"""An agent's run: a long system prompt, and turns that add an answer and a tool's result, with and without reuse.

    python -m bench.prefix_agents --geometry qwen3.6-35b-a3b --out bench/results/h200/prefix_agents.json
    python -m bench.prefix_agents --model DIR --system 200 --turns 3 --tool 20 --device cpu --out /tmp/agents.json

Each turn's prompt is the whole text so far, as clients of a chat send it. A row has the tokens of its prompt, those
that were read (the others' state was there), and the time to the first token. A geometry's weights are random. The
tokens of both runs are compared: the file says whether they are the same.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.lib.clock import percentile
from bench.lib.conditions import stamps_of, write_json
from bench.lib.subjects import add_agent_options, known_geometry, one_subject
from lowlat import Runtime, SamplingParams
from lowlat.tools.bench.geometry import random_target

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both runs and write the file; returns 1 where their tokens differ."""
    options = _options(arguments)
    found, tokens = {}, []
    for reuse in (True, False):
        with TemporaryDirectory() as folder:
            model = options.model
            if options.geometry is not None:
                device = torch.device("cuda:0" if options.device == "auto" else options.device)
                model = random_target(known_geometry(options.geometry), Path(folder), device=device)
            with Runtime.load(
                model, device=options.device, max_batch=1, max_context=_longest(options), prefix_reuse=reuse,
                state_cache_gib=options.state_cache_gib,
            ) as runtime:  # fmt: skip
                _turn(runtime, [1] * options.tool, options.answer, 1)  # the first launch of a program loads it
                rows, said = _run(runtime, options)
                if reuse:
                    states = runtime.summary()["kv"].get("snapshots")
        found["reused" if reuse else "cold"] = rows
        tokens.append(said)
    same = tokens[0] == tokens[1]
    result = {
        "model": options.geometry or str(options.model),
        "weights": "random" if options.geometry else "the model's",
        **{name: getattr(options, name) for name in ("system", "turns", "tool", "answer", "state_cache_gib")},
        "snapshots": states,
        "same_tokens": same,
        **stamps_of(torch.device("cuda:0" if torch.cuda.is_available() else "cpu"), options.commit),
        "turns_of": found,
    }
    write_json(options.out, result)
    for name, rows in found.items():
        later = [row["first_token_ms"] for row in rows[1:]]
        read = [row["tokens_read"] for row in rows[1:]]
        print(f"{name}: first turn {rows[0]['first_token_ms']:.1f} ms, later ones p50 {percentile(later, 50):.1f} ms, "
              f"the last {later[-1]:.1f}; tokens read {min(read)} to {max(read)}")  # fmt: skip
    print(json.dumps({"same_tokens": same}))
    return int(not same)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", help="a name in geometries.toml, with random weights")
    parser.add_argument("--model", type=Path, help="a target's directory")
    add_agent_options(parser, "the")
    parser.add_argument("--state-cache-gib", type=float, default=2.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--out", type=Path, required=True)
    return one_subject(parser, parser.parse_args(arguments))


def _longest(options: argparse.Namespace) -> int:
    return int(options.system + options.turns * (options.tool + options.answer) + options.answer)


def _run(runtime: Runtime, options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """The rows of all turns, and their tokens."""
    source = torch.Generator().manual_seed(4)
    most = runtime.model_config.vocab_size

    def text(count: int) -> list[int]:
        return torch.randint(0, most, (count,), generator=source).tolist()

    prompt, rows, said = text(options.system), [], []
    for turn in range(options.turns):
        prompt = [*prompt, *text(options.tool)]
        tokens, first, read = _turn(runtime, prompt, options.answer, turn)
        rows.append({"prompt_tokens": len(prompt), "tokens_read": read, "first_token_ms": round(first, 3)})
        said.append(tokens)
        prompt = [*prompt, *tokens]
    return rows, said


def _turn(runtime: Runtime, prompt: list[int], answer: int, seed: int) -> tuple[list[int], float, int]:
    """An answer's tokens, the time to the first in ms, and the tokens of the prompt that were read."""
    before, tokens, first = runtime.kvcache.stats().hit_tokens, list[int](), 0.0
    begin = time.perf_counter()
    runtime.submit(prompt, SamplingParams(max_tokens=answer, temperature=0.8, seed=seed, ignore_eos=True))
    while runtime.busy:
        for output in runtime.step():
            first = first or 1e3 * (time.perf_counter() - begin)
            tokens += output.token_ids
    return tokens, first, len(prompt) - (runtime.kvcache.stats().hit_tokens - before)


if __name__ == "__main__":
    sys.exit(main())
