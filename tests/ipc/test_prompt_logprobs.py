"""The logprobs of prompts on the wire: parts of bounded size, whole again at the client, and what does not fit."""

import asyncio
import struct

import pytest
from fake_engine import FakeEngine, expected_tokens, prompt_logprobs
from scripted_server import ids_of
from served import Serve

from lowlat.errors import RequestError
from lowlat.ipc import AsyncClient, Client
from lowlat.ipc.client import protocol
from lowlat.ipc.messages import PromptPart
from lowlat.ipc.prompt_logprobs import PromptLogprobs
from lowlat.ipc.wire import Sampling, Tokens, encode, pack_tokens

MAX_BYTES = 3 << 19


def given(length: int, num_top: int, *, text: bool = True) -> PromptLogprobs:
    prompt = [(7 * place + 3) % 900 for place in range(length)]
    found = prompt_logprobs(prompt, Sampling(prompt_logprobs=num_top), text)
    assert found is not None
    return found


@pytest.mark.parametrize(("length", "num_top", "count"), [(1, 0, 1), (2, 3, 1), (3000, 20, 2), (40000, 0, 2)])
@pytest.mark.parametrize("text", [True, False])
def test_parts_are_bounded_and_make_the_whole(length: int, num_top: int, count: int, text: bool) -> None:
    whole = given(length, num_top, text=text)
    parts = list(whole.parts())
    assert len(parts) == count and {part.total for part in parts} == {length}
    assert all(len(encode(Tokens(1, 0, b"", prompt_logprobs=part))) < MAX_BYTES for part in parts)
    assert PromptLogprobs.of_parts(parts) == whole
    assert len(whole) == length and whole[0] is None and whole.prompt()[:2] == (3, 10)[:length]


def test_an_entry_has_what_the_engine_gave() -> None:
    whole = given(5, 2)
    one = whole[-1]
    assert one is not None and one == whole[4] == whole[4:][0]
    assert (one.token_id, one.logprob, one.rank, one.top) == (31, -31 / 8, 32, ((0, 0.0), (1, -0.125)))
    assert one.texts == (b"t31 ", b"t0 ", b"t1 ")
    assert whole.prompt_texts() == [b"t3 ", b"t10 ", b"t17 ", b"t24 ", b"t31 "]
    with pytest.raises(IndexError):
        whole[5]
    assert whole != given(5, 1) and whole != 3 and given(4, 1).tokens() == {0, 3, 10, 17, 24}


def part(**changed: object) -> PromptPart:
    fields = {"start": 0, "total": 1, "num_top": 1, "token_ids": pack_tokens([5]), "logprobs": struct.pack("<f", 0)}
    fields |= {"ranks": pack_tokens([0]), "top_ids": pack_tokens([-1]), "top_logprobs": struct.pack("<f", 0)}
    return PromptPart(**{**fields, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changed",
    [
        {"start": 1},
        {"token_ids": b"abc"},
        {"logprobs": b""},
        {"ranks": pack_tokens([1, 2])},
        {"top_ids": b""},
        {"num_top": 2},
        {"texts": b"abc", "text_ids": pack_tokens([5]), "text_lengths": pack_tokens([2])},
        {"texts": b"abc", "text_ids": pack_tokens([5, 6]), "text_lengths": pack_tokens([3])},
        {"texts": b"abc", "text_ids": b"xyz", "text_lengths": pack_tokens([3])},
    ],
    ids=str,
)
def test_parts_that_do_not_fit_are_refused(changed: dict[str, object]) -> None:
    assert len(PromptLogprobs.of_parts([part()])) == 1
    with pytest.raises(ValueError, match=r"fit|multiple"):
        PromptLogprobs.of_parts([part(**changed)])


def test_clients_get_them_before_the_first_token(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as all parts are there, which come at once: no heartbeat wakes whoever waits for them."""
    monkeypatch.setattr(protocol, "HEARTBEAT_INTERVAL_S", 60.0)
    served = serve(FakeEngine(0.001, max_context=1 << 16))
    prompt = [place % 800 for place in range(4000)]
    expected = prompt_logprobs(prompt, Sampling(prompt_logprobs=20), served.engine.text)
    with Client(served.server.endpoint, window=1) as client:
        chunks = list(client.generate(prompt, max_tokens=6, prompt_logprobs=20, timeout_s=20.0))
        assert chunks[0].prompt_logprobs == expected and not chunks[0].token_ids
        assert all(chunk.prompt_logprobs is None for chunk in chunks[1:])
        assert ids_of(chunks) == expected_tokens(prompt, 6)
        assert all(chunk.prompt_logprobs is None for chunk in client.generate(prompt, max_tokens=3))
        with pytest.raises(RequestError, match="prompt_logprobs"):
            client.generate(prompt, prompt_logprobs=21)

    async def main() -> None:
        async with AsyncClient(served.server.endpoint) as client:
            found = [chunk async for chunk in client.generate(prompt, max_tokens=2, prompt_logprobs=20)]
            assert found[0].prompt_logprobs == expected

    asyncio.run(main())
