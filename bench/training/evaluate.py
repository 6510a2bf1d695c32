"""Measure the acceptance of an EAGLE3 draft model, without the runtime.

    python -m bench.training.evaluate --target DIR --head DIR --prompts FILE [--chat] [--spec-tokens 3]

The target writes a continuation of each prompt, greedy and at a temperature. Acceptance is then a fact about the
finished text: a cycle that starts at a position drafts S tokens from the true features before it, and a draft is
accepted when it equals the text (for sampling this is sample-and-match: the text is what the target drew). All
positions are drafted in one parallel pass; the cycles are walked over the result. A chain draft is the draft model's
argmax, so that a cycle's fed-back tokens equal the text as long as it still counts.

Reported by domain, and again without the texts that loop, since loops are easy to draft.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.training.corpus import read_prompts
from bench.training.eagle3 import Eagle3DraftModel, load_draft_model
from bench.training.teacher import Teacher

__all__ = ["acceptance", "draft_matches", "evaluate", "loops", "walk_cycles"]


def loops(tokens: Sequence[int], *, width: int = 4, limit: float = 0.35) -> bool:
    """Say whether a text repeats itself: more than `limit` of its 4-grams have occurred before in it."""
    grams = [tuple(tokens[i : i + width]) for i in range(len(tokens) - width + 1)]
    return len(grams) >= 16 and 1 - len(set(grams)) / len(grams) > limit


def walk_cycles(matches: Sequence[Sequence[bool]], start: int, end: int, spec_tokens: int) -> list[int]:
    """Return the accepted count of each cycle over a text.

    matches      matches[k][j]: the draft of step k at row j equals token j + 2
    start, end   positions of the prompt's last token (the first root) and of the text's last token
    A cycle whose root is at position n starts with row n - 1 and yields its accepted count plus one token.
    Cycles that would draft past the end are left out.
    """
    counts = []
    root = start
    while root + spec_tokens <= end:
        accepted = 0
        while accepted < spec_tokens and matches[accepted][root - 1 + accepted]:
            accepted += 1
        counts.append(accepted)
        root += accepted + 1
    return counts


@torch.no_grad()
def draft_matches(
    teacher: Teacher, head: Eagle3DraftModel, texts: Sequence[Sequence[int]], spec_tokens: int
) -> torch.Tensor:
    """Return whether each row's draft of each step equals the text, [S, texts, longest - 1] bool."""
    longest = max(len(text) for text in texts)
    tokens = torch.zeros(len(texts), longest, dtype=torch.long)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(list(text))
    tokens = tokens.to(teacher.device)
    features, _ = teacher.features(tokens, head.sizes.boundaries)
    dtype = head.fc.weight.dtype
    steps = head.steps(teacher.embed(tokens[:, 1:]).to(dtype), features[:, :-1].to(dtype), spec_tokens)
    following = torch.nn.functional.pad(tokens[:, 2:], (0, 1), value=-1)
    return torch.stack([head.draft_ids[head.lm_head(state).argmax(-1)] == following for state in steps])


def acceptance(
    teacher: Teacher,
    head: Eagle3DraftModel,
    prompts: Sequence[Sequence[int]],
    *,
    spec_tokens: int,
    max_tokens: int,
    temperature: float,
    batch: int = 256,
) -> list[dict[str, Any]]:
    """Continue each prompt and draft along it; one record a prompt: accepted, cycles, firsts, loops, tokens."""
    records: list[dict[str, Any]] = []
    for begin in range(0, len(prompts), batch):
        some = prompts[begin : begin + batch]
        written = teacher.generate(some, max_tokens, temperature=temperature)
        texts = [[*prompt, *new] for prompt, new in zip(some, written, strict=True)]
        matches = draft_matches(teacher, head, texts, spec_tokens).cpu()
        for row, text in enumerate(texts):
            here = matches[:, row].tolist()
            counts = walk_cycles(here, len(some[row]) - 1, len(text) - 1, spec_tokens)
            record: dict[str, Any] = {"accepted": sum(counts), "cycles": len(counts), "loops": loops(written[row])}
            record["reached"] = [sum(count > k for count in counts) for k in range(spec_tokens)]
            records.append({**record, "tokens": len(written[row]), "new": written[row]})
    return records


def _summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    cycles = sum(record["cycles"] for record in records)
    accepted = sum(record["accepted"] for record in records)
    steps = len(records[0]["reached"]) if records else 0
    reached = [cycles, *(sum(record["reached"][k] for record in records) for k in range(steps))]
    return {
        "prompts": len(records),
        "cycles": cycles,
        "mean_acceptance_length": round(1 + accepted / max(1, cycles), 3),
        "match_by_step": [round(reached[k + 1] / max(1, reached[k]), 3) for k in range(steps)],
    }


def evaluate(
    teacher: Teacher,
    head: Eagle3DraftModel,
    prompts: dict[str, list[list[int]]],
    *,
    spec_tokens: int = 3,
    max_tokens: int = 128,
    temperatures: Sequence[float] = (0.0, 0.7),
) -> dict[str, Any]:
    """Return the acceptance by temperature and domain; `all` and `all, not looping` are over every prompt."""
    head = head.to(teacher.device, dtype=next(teacher.model.parameters()).dtype).eval()
    flat = [(domain, prompt) for domain, some in prompts.items() for prompt in some]
    result: dict[str, Any] = {"spec_tokens": spec_tokens, "max_tokens": max_tokens}
    for temperature in temperatures:
        records = acceptance(
            teacher,
            head,
            [prompt for _, prompt in flat],
            spec_tokens=spec_tokens,
            max_tokens=max_tokens,
            temperature=temperature,
        )
        table = {"all": _summary(records)}
        table["all, not looping"] = _summary([record for record in records if not record["loops"]])
        for domain in prompts:
            table[domain] = _summary([r for r, (d, _) in zip(records, flat, strict=True) if d == domain])
        result[f"temperature {temperature:g}"] = table
    return result


def encode_prompts(teacher: Teacher, prompts: dict[str, list[str]], *, chat: bool) -> dict[str, list[list[int]]]:
    """Return token ids by domain, under the chat template or as plain text."""

    def encode(prompt: str) -> list[int]:
        if chat:
            return teacher.chat_ids(prompt)
        return [int(i) for i in teacher.tokenizer(prompt, add_special_tokens=False)["input_ids"]]

    return {domain: [encode(prompt) for prompt in some] for domain, some in prompts.items()}


def print_table(result: dict[str, Any]) -> None:
    """Print what `evaluate` returned, one line a temperature and domain."""
    for name, table in result.items():
        if isinstance(table, dict):
            for domain, row in table.items():
                figures = f"{row['mean_acceptance_length']:.3f}  {row['match_by_step']}"
                print(f"{name:16} {domain:18} {row['prompts']:5} prompts {row['cycles']:7} cycles  {figures}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the acceptance of an EAGLE3 draft model.")
    parser.add_argument("--target", required=True, help="Hugging Face directory of the target")
    parser.add_argument("--head", required=True, help="directory of the draft model")
    parser.add_argument("--prompts", required=True, help="JSON by domain, JSON list, or one prompt a line")
    parser.add_argument("--chat", action="store_true", help="put prompts under the target's chat template")
    parser.add_argument("--spec-tokens", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", help="write the figures as JSON")
    arguments = parser.parse_args()
    teacher = Teacher.load(arguments.target, arguments.device)
    prompts = encode_prompts(teacher, read_prompts(arguments.prompts), chat=arguments.chat)
    result = evaluate(
        teacher,
        load_draft_model(arguments.head),
        prompts,
        spec_tokens=arguments.spec_tokens,
        max_tokens=arguments.max_tokens,
    )
    print_table(result)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
