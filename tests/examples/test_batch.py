"""A batch sends many prompts at once, with answers bound to a schema; the runtime decodes one in each slot."""

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import lowlat

SCHEMA = {
    "type": "object",
    "properties": {"tone": {"enum": ["glad", "sad"]}},
    "required": ["tone"],
    "additionalProperties": False,
}
TEXTS = ["What a day", "It rains", "At last", "Gone", "We won", "Too late"]


async def classified(runtime: lowlat.Runtime, texts: Sequence[str]) -> list[str]:
    """Classify the tone of each text; returns the tones in order."""
    tasks = (runtime.agenerate(f"Tone of: {text}", json_schema=SCHEMA, max_tokens=64) for text in texts)
    return [json.loads(answer.text)["tone"] for answer in await asyncio.gather(*tasks)]


def completed(runtime: lowlat.Runtime, texts: Sequence[str]) -> list[lowlat.Answer]:
    """Complete texts without asyncio: a thread waits for each request."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda text: runtime.generate(text, max_tokens=8, seed=1), texts))


def test_a_batch_is_answered_in_order(runtime: lowlat.Runtime) -> None:
    assert {*asyncio.run(classified(runtime, TEXTS))} <= {"glad", "sad"}
    answers = completed(runtime, TEXTS)
    assert [answer.token_ids for answer in answers] == [
        runtime.generate(text, max_tokens=8, seed=1).token_ids for text in TEXTS
    ]  # a request gives the same bits alone and in a batch
