"""A voice loop speaks each sentence as soon as it is complete, while the next is decoded; the user may interrupt."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable

import lowlat

SENTENCE = re.compile(r"(.+?[.!?])\s", re.DOTALL)


async def sentences(stream: lowlat.AsyncStream) -> AsyncIterator[str]:
    """Yield the answer sentence by sentence, each as soon as it is complete."""
    text = ""
    async for chunk in stream:
        text += chunk.text
        while (found := SENTENCE.match(text)) is not None:
            yield found[1].strip()
            text = text[found.end() :]
    if text.strip():
        yield text.strip()


async def speak(
    runtime: lowlat.Runtime,
    question: str,
    say: Callable[[str], Awaitable[None]],
    interrupted: asyncio.Event,
    **options: str,
) -> list[str]:
    """Say the answer; if somebody interrupts, the rest of it is cancelled. Returns the sentences that were said."""
    said: list[str] = []
    async with runtime.astream([{"role": "user", "content": question}], **options) as stream:  # type: ignore[arg-type]
        async for sentence in sentences(stream):
            if interrupted.is_set():
                break
            await say(sentence)
            said.append(sentence)
    return said


def test_sentences_are_spoken_until_somebody_interrupts(runtime: lowlat.Runtime) -> None:
    bound = {"regex": r"(Yes, it is\. ){3}Bye"}  # a random model, made to speak in sentences

    async def main() -> None:
        interrupted = asyncio.Event()
        spoken: list[str] = []

        async def say(sentence: str) -> None:
            spoken.append(sentence)
            await asyncio.sleep(0)

        assert await speak(runtime, "Is it warm?", say, interrupted, **bound) == [*["Yes, it is."] * 3, "Bye"]

        async def say_and_stop(sentence: str) -> None:
            interrupted.set()

        assert await speak(runtime, "Is it warm?", say_and_stop, interrupted, **bound) == ["Yes, it is."]

    asyncio.run(main())
