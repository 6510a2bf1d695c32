"""Sessions: what they pin stays, forks go on by themselves, files go on in other processes, and no token changes."""

import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recording import prompt_of, run_all
from stages import later
from tiny_models import make_pair, make_target
from tiny_mtp import add_mtp

from lowlat import Runtime, SamplingParams, Session, SpeculativeConfig
from lowlat.errors import RequestError, SessionError

CHUNK = 16
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_batch": 3, "max_context": 256} | {
    "block_size": 8,
    "prefill_chunk": CHUNK,
    "max_prefill_chunks": 4,
}
PARAMS = SamplingParams(max_tokens=9, temperature=0.8, seed=3)
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
# full attention with an EAGLE3 draft model, windows with n-grams, recurrent states with an MTP layer
CASES = [("llama", "eagle3"), ("gpt_oss", "ngram"), later("qwen3_5_text", "mtp")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Path, SpeculativeConfig]]:
    folder = tmp_path_factory.mktemp("models")
    pair = make_pair(folder / "pair", "llama")
    make_target(folder / "windows", "gpt_oss", sliding_window=24)
    make_target(folder / "hybrid", "qwen3_5_text", gain=0.4)
    add_mtp(folder / "hybrid", copies=True)
    eagle = SpeculativeConfig(method="eagle3", model=pair.head, num_speculative_tokens=3)
    return {
        ("llama", "eagle3"): (pair.target, eagle),
        ("llama", "ngram"): (pair.target, NGRAM),
        ("gpt_oss", "ngram"): (folder / "windows", NGRAM),
        ("qwen3_5_text", "mtp"): (folder / "hybrid", SpeculativeConfig(method="mtp", num_speculative_tokens=2)),
    }


@pytest.fixture(scope="module")
def target(models: dict[tuple[str, str], tuple[Path, SpeculativeConfig]]) -> Path:
    return models[("llama", "ngram")][0]


def answer(runtime: Runtime, prompt: list[int], **options: Any) -> list[int]:
    name = runtime.submit(prompt, PARAMS, **options)
    return run_all(runtime)[name]


def found(runtime: Runtime) -> int:
    return runtime.kvcache.stats().hit_tokens


@pytest.mark.parametrize(("family", "method"), CASES)
def test_turns_forks_and_files_have_the_tokens_of_requests_without_a_session(
    models: dict[tuple[str, str], tuple[Path, SpeculativeConfig]], family: str, method: str, tmp_path: Path
) -> None:
    target, speculative = models[(family, method)]
    first, second, third = prompt_of(5 * CHUNK + 3), prompt_of(8, seed=51), prompt_of(9, seed=52)
    with Runtime.load(target, prefix_reuse=False, **OPTIONS) as runtime:  # no drafts, and each prompt read whole
        expected = [answer(runtime, first)]
        begun = first + expected[0]
        expected += [answer(runtime, begun + more) for more in (second, third)]
    with Runtime.load(target, speculative, **OPTIONS) as runtime:
        session = runtime.session("agent")
        got = [answer(runtime, first, session=session)]
        assert list(session.token_ids) == begun and session.seed == 3
        assert session.save(tmp_path / "file") == (tmp_path / "file").stat().st_size
        twin = session.fork()
        for each, more in ((session, second), (twin, third)):
            got.append(answer(runtime, [*begun, *more], session=each))
        assert got == expected and twin.session_id == "agent-1" and found(runtime) == 2 * 5 * CHUNK
        assert runtime.kvcache.stats().num_pinned >= 5 * CHUNK // 8
        for each in (session, twin):
            each.close()
        assert runtime.kvcache.stats().num_pinned == 0 and runtime.summary()["kv"]["sessions"]["num_ended"] == 2
    with Runtime.load(target, speculative, **OPTIONS) as runtime:
        again = runtime.load_session(tmp_path / "file", session_id="other", cache_salt="its own")
        assert list(again.token_ids) == begun and again.cache_salt == "its own"
        assert answer(runtime, [*again.token_ids, *second], session=again) == expected[1]
        assert found(runtime) == 5 * CHUNK
        runtime.kvcache.invariants()


@pytest.mark.parametrize("tiers", [{}, {"host_cache_gib": 0.01}], ids=["device", "host"])
def test_a_prefix_of_a_session_stays_while_others_go(target: Path, tiers: dict[str, Any]) -> None:
    prompt, small = prompt_of(5 * CHUNK + 3), {**OPTIONS, "max_batch": 1, "kv_blocks": 40, **tiers}
    with Runtime.load(target, **small) as runtime:
        answer(runtime, prompt, session="kept")
        for seed in range(1, 6):
            answer(runtime, prompt_of(5 * CHUNK, seed=seed))
        for other in (prompt_of(3 * CHUNK, seed=8), [*prompt, *prompt_of(3 * CHUNK, seed=8)]):
            name = runtime.submit(other, PARAMS, session="kept")
            for _ in range(3):
                runtime.step()
            runtime.cancel(name)  # what is broken off lets go of nothing
            run_all(runtime)
            assert runtime.kvcache.stats().num_pinned >= 10
        answer(runtime, prompt, session="kept")
        before = found(runtime)
        answer(runtime, prompt)
        assert found(runtime) == before + 5 * CHUNK
        stats = runtime.kvcache.stats()
        assert stats.num_pinned == 10 and stats.num_broken_pins == 0
        answer(runtime, prompt_of(240, seed=9))  # has no other place: a pin never makes a request wait
        assert runtime.kvcache.stats().num_broken_pins > 0
        before = found(runtime)
        answer(runtime, prompt, session="kept")
        assert (found(runtime) - before == 5 * CHUNK) is bool(tiers)


def test_a_session_lives_as_long_after_its_last_request_as_it_says(target: Path) -> None:
    now = 0.0
    with Runtime.load(target, session_ttl_s=10.0, **OPTIONS) as runtime:
        runtime.sessions._clock = lambda: now
        session, longer = runtime.session("a"), runtime.session("b", ttl_s=100.0)
        for each in (session, longer):
            answer(runtime, prompt_of(2 * CHUNK + 1), session=each)
        now = 9.0
        answer(runtime, prompt_of(2 * CHUNK + 1), session="a")
        now = 18.0
        assert len(runtime.sessions) == 2
        runtime.submit(prompt_of(2 * CHUNK + 1), PARAMS, session=session)
        now = 60.0  # a request under way keeps it
        assert runtime.summary()["kv"]["sessions"] == {"num_sessions": 2, "num_running": 1, "num_ended": 0}
        run_all(runtime)
        for now, count in ((71.0, 1), (120.0, 0)):  # noqa: B007
            kv = runtime.summary()["kv"]
            assert kv["sessions"]["num_sessions"] == count and kv["num_pinned"] == 4 * count
        assert answer(runtime, [*session.token_ids], session=session) and len(runtime.sessions) == 1


def test_sessions_of_two_salts_are_two(target: Path) -> None:
    with Runtime.load(target, **OPTIONS) as runtime:
        one, other = (runtime.session("agent", cache_salt=salt) for salt in ("a", "b"))
        answer(runtime, prompt_of(20), session=one)
        assert one.token_ids and not other.token_ids
        answer(runtime, prompt_of(20), session="agent", cache_salt="b")
        assert other.token_ids == one.token_ids
        with pytest.raises(RequestError, match="cache_salt of its own"):
            runtime.submit([1], session=one, cache_salt="b")
        with pytest.raises(RequestError, match="there is a session 'agent' already"):
            one.fork("agent")
        with pytest.raises(RequestError, match="1 to 128 printable characters"):
            runtime.submit([1], session="")
        with Runtime.load(target, **OPTIONS) as second, pytest.raises(RequestError, match="another runtime"):
            second.submit([1], session=one)


def test_choices_read_their_prompt_once(target: Path) -> None:
    prompt = prompt_of(6 * CHUNK + 1)
    with Runtime.load(target, **OPTIONS) as runtime:
        alone = [runtime.generate(prompt, PARAMS, seed=3 + place).token_ids for place in range(3)]
    with Runtime.load(target, NGRAM, **OPTIONS) as runtime:
        session = runtime.session("best")
        answers = runtime.choices(prompt, 3, PARAMS, session=session)
        assert [each.token_ids for each in answers] == alone
        assert session.token_ids == (*prompt, *alone[0]) and session.seed == 3
        read = sum(each.metrics["prompt_tokens"] - each.metrics["cached_prompt_tokens"] for each in answers)
        assert read == len(prompt) + 2 * 1
        (best,) = runtime.choices(prompt, 1, PARAMS, best_of=3, session="other")
        assert best.token_ids in alone and best.logprobs is not None
        other = runtime.session("other")
        assert other.token_ids == (*prompt, *best.token_ids) and other.seed == 3 + alone.index(best.token_ids)
        with pytest.raises(RequestError, match="best_of must be from 2"):
            runtime.choices(prompt, 2, best_of=1)


def test_forks_and_files_amid_an_open_prompt_and_a_pause(target: Path, tmp_path: Path) -> None:
    first, more = prompt_of(3 * CHUNK + 3), prompt_of(2 * CHUNK, seed=5)
    with Runtime.load(target, prefix_reuse=False, **OPTIONS) as runtime:
        begun = [*first, *answer(runtime, first)]
        grown, paused = answer(runtime, begun + more), answer(runtime, [*begun, 7])
    with Runtime.load(target, NGRAM, can_sleep=True, host_cache_gib=0.01, **OPTIONS) as runtime:
        tokens: defaultdict[str, list[int]] = defaultdict(list)

        def step() -> None:
            for output in runtime.step():
                tokens[output.request_id] += output.token_ids

        session = runtime.session("agent")
        session.data["said"] = ["hello"]
        answer(runtime, first, session=session)
        handle = runtime.open_prompt(PARAMS, session=session)
        handle.append(begun + more[:9])
        name = runtime.submit([*begun, 7], PARAMS, session=session)
        while not tokens[name]:
            step()
        assert runtime.pause(name)
        twin = session.fork()
        twin.data["said"].append("and more")
        session.save(tmp_path / "file")
        handle.finish(speculative=True)
        for _ in range(3):
            step()
        handle.append(more[9:])
        handle.finish()
        runtime.resume(name)
        while runtime.busy:
            step()
        assert (tokens[handle.request_id], tokens[name]) == (grown, paused)
        assert answer(runtime, [*twin.token_ids, 7], session=twin) == paused
        runtime.sleep()
        with pytest.raises(RequestError, match="wake"):
            runtime.load_session(tmp_path / "file", session_id="again")
        runtime.wake()
        again, before = runtime.load_session(tmp_path / "file", session_id="again"), found(runtime)
        assert answer(runtime, [*again.token_ids, 7], session=again) == paused and found(runtime) > before
        assert again.data == session.data == {"said": ["hello"]}


@pytest.fixture(scope="module")
def saved(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A session's file, and the tokens that come after it."""
    path = tmp_path_factory.mktemp("saved") / "session"
    with Runtime.load(target, **OPTIONS) as runtime:
        session = runtime.session("agent")
        session.data["messages"] = [{"role": "user", "content": "hello"}]
        answer(runtime, prompt_of(3 * CHUNK + 2), session=session)
        session.save(path)
        return path, answer(runtime, [*session.token_ids])


def torn(data: bytes) -> bytes:
    return data[:-1]


def altered(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def emptied(data: bytes) -> bytes:
    return b""


def resealed(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        line, _, rest = data.partition(b"\n")
        header = json.loads(line)
        change(header)
        body = json.dumps(header).encode() + b"\n" + rest[:-32]
        return body + hashlib.blake2b(body, digest_size=32).digest()

    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (torn, "is torn or altered"),
        (altered, "is torn or altered"),
        (emptied, "is no session's file"),
        (resealed(lambda header: header.update(lowlat_session=2)), "is of version 2"),
        (resealed(lambda header: header.update(num_tokens=1)), "other sizes"),
        (resealed(lambda header: header.update(contents=3)), "no session's file of this version"),
        (resealed(lambda header: header.update(numerics="f" * 16)), "has numerics ffff.*force=True"),
        (resealed(lambda header: header.update(model="f" * 16)), "whose files are not those of.*force=True"),
        (resealed(lambda header: header["contents"].reverse()), None),
        (resealed(lambda header: header["contents"][0].__setitem__(0, 9)), "is altered: its contents"),
    ],
)
def test_a_file_that_is_torn_altered_or_foreign_is_refused_by_name(
    change: Callable[[bytes], bytes], message: str | None, target: Path, saved: tuple[Path, list[int]], tmp_path: Path
) -> None:
    path, expected = tmp_path / "session", saved[1]
    path.write_bytes(change(saved[0].read_bytes()))
    path.chmod(0o600)
    with Runtime.load(target, **OPTIONS) as runtime:
        if message is not None:
            with pytest.raises(SessionError, match=message):
                runtime.load_session(path)
            assert len(runtime.sessions) == 0 and runtime.kvcache.stats().num_evictable == 0
        if message is None or "force" in message:
            session = runtime.load_session(path, force=True)
            assert session.data == {"messages": [{"role": "user", "content": "hello"}]}
            if message is not None:  # what is of another model is read again
                assert answer(runtime, [*session.token_ids], session=session) == expected and found(runtime) == 0


def test_a_file_that_others_may_write_or_that_cannot_be_written_is_refused(
    target: Path, saved: tuple[Path, list[int]], tmp_path: Path
) -> None:
    path = tmp_path / "session"
    path.write_bytes(saved[0].read_bytes())
    assert saved[0].stat().st_mode & 0o777 == 0o600
    path.chmod(0o622)
    with Runtime.load(target, **OPTIONS) as runtime:
        with pytest.raises(SessionError, match=r"others than this user.*chmod 600"):
            runtime.load_session(path)
        with pytest.raises(SessionError, match="cannot be read: No such file"):
            runtime.load_session(tmp_path / "none")
        session = runtime.load_session(saved[0])
        with pytest.raises(SessionError, match="cannot be written: No such file"):
            session.save(tmp_path / "none" / "session")
        assert answer(runtime, [*session.token_ids], session=session) == saved[1] and found(runtime) == 3 * CHUNK
        with pytest.raises(RequestError, match="there is a session 'agent' already"):
            runtime.load_session(saved[0])
        with pytest.raises(RequestError, match="has no tokens"):
            runtime.session("new").save(path)
        runtime.kvcache.invariants()


def test_a_session_of_files_that_were_changed_since_the_load_is_not_saved(
    target: Path, saved: tuple[Path, list[int]], tmp_path: Path
) -> None:
    """Its state would pass for that of the model that lies there by then."""
    model = tmp_path / "model"
    shutil.copytree(target, model)
    with Runtime.load(model, **OPTIONS) as runtime:
        session = runtime.session("another")
        answer(runtime, prompt_of(3 * CHUNK + 2), session=session)
        weights = model / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-2:] = b"\0\0"
        weights.write_bytes(data)
        with pytest.raises(SessionError, match=r"were changed since they were loaded"):
            session.save(tmp_path / "kept")
        assert not (tmp_path / "kept").exists() and runtime.kvcache.stats().num_used == 0
        with pytest.raises(SessionError, match=r"were changed since they were loaded.*force=True"):
            runtime.load_session(saved[0])
        again = runtime.load_session(saved[0], force=True)
        assert answer(runtime, [*again.token_ids], session=again) == saved[1]
        runtime.kvcache.invariants()


@pytest.mark.parametrize(("family", "method"), [("gpt_oss", "ngram"), later("qwen3_5_text", "mtp")])
def test_a_file_whose_contents_come_by_several_batches_goes_on_from_all_of_them(
    models: dict[tuple[str, str], tuple[Path, SpeculativeConfig]],
    family: str,
    method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A window's chunks among them: what rows see of it is several contents, each of which may be large."""
    target, speculative = models[(family, method)]
    options = {**OPTIONS, "max_context": 500, "kv_blocks": 220}
    with Runtime.load(target, speculative, **options) as runtime:
        session = runtime.session("agent")
        begun = prompt_of(20 * CHUNK + 3) + answer(runtime, prompt_of(20 * CHUNK + 3), session=session)
        session.save(tmp_path / "agent")
        expected = answer(runtime, [*begun, 1], session=session)
        assert found(runtime) == 20 * CHUNK
    monkeypatch.setattr("lowlat.engine.sessions.files.BATCH_BYTES", 1)
    with Runtime.load(target, speculative, **options) as runtime:
        session = runtime.load_session(tmp_path / "agent")
        assert answer(runtime, [*begun, 1], session=session) == expected
        assert found(runtime) == 20 * CHUNK
        runtime.kvcache.invariants()


def test_a_session_in_files_of_the_cache_is_saved_whole(target: Path, tmp_path: Path) -> None:
    """Contents below the device's memory come back to it, while the caller waits."""
    small = {**OPTIONS, "max_batch": 1, "kv_blocks": 36, "cache_dir": tmp_path / "cache"}
    prompt = prompt_of(5 * CHUNK + 3)
    with Runtime.load(target, **small) as runtime:
        session = runtime.session("agent")
        expected = answer(runtime, prompt, session=session)
        answer(runtime, prompt_of(240, seed=4))
        size = session.save(tmp_path / "file")
    with Runtime.load(target, **OPTIONS) as runtime:
        again: Session = runtime.load_session(tmp_path / "file")
        assert answer(runtime, prompt, session=again) == expected and found(runtime) == 5 * CHUNK
    assert size > 5 * CHUNK * 100
