"""Memory that leaves and files that are written, amid failures: each ends in a state of its own, and nothing is wrong.

killed amid a save        files that were complete are read, what was half written is taken out
killed amid a copy        the same, and answers have the same tokens
the disk is full          answers go on, with one warning; models' states are written when there is space again; a file
                          of a session stays as it was (SessionError)
the device fails          amid a wake: clients are told "device", the server ends with 1
killed amid a wake        the supervisor starts the process again, and the others go on (tests/http/test_models.py)
host memory is refused    the model stays awake, and says why (tests/ipc/test_residence.py, tests/unit/test_sleep.py); a
                          request keeps its slot (CapacityError, tests/unit/test_pause.py); a session is not saved
                          (CapacityError), and goes on; at the start a ConfigError
the device fails          amid a copy: DeviceError, which names it (tests/unit/test_block_moves.py); amid a save: the
                          same, and the file stays as it was
a copy is refused         what did not come to the device is a miss, with a warning (tests/unit/test_cache_tiers.py)
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine
from raw_client import raw_client
from recording import prompt_of, run_all
from served import eventually
from tiny_models import make_target

from lowlat import Runtime, SamplingParams
from lowlat.errors import CapacityError, ConfigError, DeviceError, ServerGone, SessionError
from lowlat.executors.block_moves import BlockMover
from lowlat.ipc import Client
from lowlat.ipc.server import Server
from lowlat.sequence.tiers.disk import DiskTier
from lowlat.sequence.tiers.key import ChunkKey
from lowlat.serving.models.roster import Roster
from lowlat.serving.models.supervisor import Supervisor
from lowlat.serving.models.tables import read_tables

FINGERPRINT, SIZE = "f" * 16, 3_000_000
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_batch": 1, "max_context": 200} | {
    "block_size": 8,
    "prefill_chunk": 16,
}
WRITES = """
import sys
from pathlib import Path
import torch
from lowlat.sequence.tiers.disk import DiskTier
from lowlat.sequence.tiers.key import ChunkKey
tier = DiskTier(Path(sys.argv[1]), 1 << 40, "f" * 16)
print("ready", flush=True)
for number in range(10_000):
    tier.write(ChunkKey(number.to_bytes(32, "little"), ""), torch.full((3_000_000,), number % 251, dtype=torch.uint8))
"""


def content(tier: DiskTier, number: int) -> torch.Tensor | None:
    """The content that a tier holds of a number."""
    return tier.read(ChunkKey(number.to_bytes(32, "little"), ""), lambda size: torch.empty(size, dtype=torch.uint8))


@pytest.mark.wide  # the next has files of a cache, too
def test_a_process_that_is_killed_amid_a_save_leaves_whole_files_alone(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITES, str(tmp_path / "cache")], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        root = tmp_path / "cache" / FINGERPRINT
        eventually(lambda: len(list(root.glob("*.chunk"))) > 3, 30.0)
        eventually(lambda: any(path.stat().st_size for path in root.glob(".writing-*")), 30.0)
        writer.send_signal(signal.SIGSTOP)  # amid a write, as often as not
        writer.kill()
    tier = DiskTier(tmp_path / "cache", 1 << 40, FINGERPRINT)
    kept = len(list(root.glob("*.chunk")))
    for number in range(kept):
        found = content(tier, number)
        assert found is not None and found.numel() == SIZE and bool((found == number % 251).all())
    assert content(tier, kept) is None
    for path in root.glob(".writing-*"):  # of late: a process of another machine may write it
        os.utime(path, (time.time() - 3600, time.time() - 3600))
    DiskTier(tmp_path / "cache", 1 << 40, FINGERPRINT)
    assert list(root.glob(".writing-*")) == []


SAVES = """
import os, sys, time
from pathlib import Path
from lowlat import Runtime, SamplingParams
target, folder, prompt, options = Path(sys.argv[1]), Path(sys.argv[2]), *map(eval, sys.argv[3:])
runtime = Runtime.load(target, host_cache_gib=0.1, cache_dir=folder / "cache", **options)
def ask(tokens, session=None):
    runtime.submit(tokens, SamplingParams(max_tokens=9, temperature=0.8, seed=3), session=session)
    while runtime.busy:
        runtime.step()
session = runtime.session("kept")
ask(prompt, session)
session.save(folder / "kept")
ask([*prompt[::-1], *prompt])
ask([*session.token_ids, 1], session)
runtime.kvcache.tiers.flush()
runtime.kvcache.tiers.max_bytes_per_s = 1.0  # copies take for ever from here on
ask(prompt[50::-1])
def stop(descriptor):
    print("amid", runtime.kvcache.tiers.stats()["copies_under_way"], flush=True)
    time.sleep(99)
os.fsync = stop
session.save(folder / "kept")
"""


@pytest.mark.second
def test_a_process_that_is_killed_amid_copies_and_a_save_loses_nothing_that_was_whole(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    make_target(tmp_path / "target", "llama")
    prompt, params = prompt_of(90), SamplingParams(max_tokens=9, temperature=0.8, seed=3)
    given = [str(tmp_path / "target"), str(tmp_path), repr(prompt), repr(OPTIONS)]
    with Runtime.load(tmp_path / "target", prefix_reuse=False, **OPTIONS) as runtime:
        name = runtime.submit(prompt, params)
        answer = run_all(runtime)[name]
        name = runtime.submit([*prompt, *answer, 1], params)
        expected = run_all(runtime)[name]
    with subprocess.Popen([sys.executable, "-c", SAVES, *given], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = process.stdout.readline().split()
        process.kill()
    assert said[0] == b"amid" and int(said[1]) > 0
    left = list(tmp_path.glob(".kept-*"))
    assert len(left) == 1
    with Runtime.load(tmp_path / "target", host_cache_gib=0.1, cache_dir=tmp_path / "cache", **OPTIONS) as runtime:
        session = runtime.load_session(tmp_path / "kept")
        assert session.token_ids == (*prompt, *answer)
        before = runtime.kvcache.stats().hit_tokens
        name = runtime.submit([*session.token_ids, 1], params, session=session)
        assert run_all(runtime)[name] == expected and runtime.kvcache.stats().hit_tokens - before == 96
        session.save(tmp_path / "kept")
        assert list(tmp_path.glob(".kept-*")) == left  # it may be written to by a process of another machine
        os.utime(left[0], (1, 1))
        session.save(tmp_path / "kept")
        assert list(tmp_path.glob(".kept-*")) == []


def test_a_session_that_cannot_be_saved_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_target(tmp_path / "target", "llama")
    with Runtime.load(tmp_path / "target", **OPTIONS) as runtime:
        session = runtime.session("kept")
        runtime.submit(prompt_of(90), SamplingParams(max_tokens=9), session=session)
        run_all(runtime)
        session.save(tmp_path / "kept")
        before = (tmp_path / "kept").read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(SessionError, match="cannot be written: No space left"):
                session.save(tmp_path / "kept")
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", refused)
            with pytest.raises(CapacityError, match="the host refuses"):
                session.save(tmp_path / "kept")
        with monkeypatch.context() as patch, pytest.raises(DeviceError, match="is lost"):
            patch.setattr(BlockMover, "start_out", lost)
            session.save(tmp_path / "kept")
        assert (tmp_path / "kept").read_bytes() == before and list(tmp_path.glob(".kept-*")) == []
        assert runtime.kvcache.stats().num_used == 0 and runtime.sessions.num_files == 0
        runtime.kvcache.invariants()
        assert session.save(tmp_path / "kept") == len(before)
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"the host refuses.*host_cache_gib"):
            patch.setattr(BlockMover, "allocate", lambda mover, size, knob: refuse(f"the host refuses; lower {knob}"))
            Runtime.load(tmp_path / "target", host_cache_gib=0.1, **OPTIONS)


def lost(*_: Any) -> None:
    raise DeviceError("the device is lost")


def refuse(words: str) -> torch.Tensor:
    raise CapacityError(words)


def refused(*shape: Any, **options: Any) -> torch.Tensor:
    """Memory, of which a system refuses the host's that devices copy from."""
    if "pin_memory" in options:
        raise RuntimeError("out of memory")
    return torch.zeros(*shape, **options)


def test_a_full_disk_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_target(tmp_path / "target", "llama")
    prompt, params = prompt_of(90), SamplingParams(max_tokens=9, temperature=0.8, seed=3)
    with Runtime.load(tmp_path / "target", **OPTIONS) as runtime:
        name = runtime.submit(prompt, params)
        expected = run_all(runtime)[name]

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    options = {**OPTIONS, "cache_dir": tmp_path / "cache", "can_sleep": True}
    with caplog.at_level(logging.WARNING), Runtime.load(tmp_path / "target", **options) as runtime:
        for _ in range(2):
            name = runtime.submit(prompt, params)
            assert run_all(runtime)[name] == expected
            runtime.sleep()
            runtime.wake()
        assert runtime.kvcache.stats().hit_tokens == 80  # from host memory
    assert len([record for record in caplog.records if "No space left" in record.getMessage()]) == 1
    assert list((tmp_path / "cache").rglob("*.chunk")) == list((tmp_path / "cache").rglob(".writing-*")) == []


def test_states_of_models_are_written_when_the_disk_has_space_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "serve.toml").write_text('[[models]]\nmodel = "a"\n')
    (tmp_path / "a").mkdir()
    shared, tables = read_tables({}, {"XDG_RUNTIME_DIR": str(tmp_path)}, tmp_path / "serve.toml")
    (tmp_path / "lowlat").mkdir()
    supervisor = Supervisor(tables, shared["endpoint"], models_gib=None, busy_s=1.0, drain_s=1.0)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        for _ in range(3):
            supervisor._write()
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    assert list((tmp_path / "lowlat").iterdir()) == []
    supervisor._write()
    assert [model.name for model in Roster.read(supervisor.roster).models] == ["a"]


def test_a_device_that_fails_amid_a_wake_ends_the_server_by_name(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    engine = FakeEngine(0.001, wake_problems=["device: the context is lost"])
    server = Server(engine, None, f"ipc://{tmp_path}/s.sock")
    codes: list[int] = []
    runner = threading.Thread(target=lambda: codes.append(server.run()))
    runner.start()
    eventually(lambda: (tmp_path / "s.sock").exists())
    with raw_client(server.endpoint), Client(server.endpoint) as client:
        assert client.sleep() == "asleep"
        with pytest.raises(ServerGone) as caught:
            for _ in client.generate([3], max_tokens=5):
                pass
        assert caught.value.code in ("device", "gone")
    runner.join(10)
    assert codes == [1]
