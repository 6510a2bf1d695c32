"""Several models of one server: their tables, who sleeps for whom, the roster, and lines between processes."""

import json
import os
import random
import re
import socket
from pathlib import Path

import pytest
from page_examples import run_example

from lowlat.cli import COMMANDS
from lowlat.errors import ConfigError, ServerGone
from lowlat.serving.models.channel import Channel
from lowlat.serving.models.places import Place, Presence, decide
from lowlat.serving.models.roster import Listed, Roster, roster_of, roster_path
from lowlat.serving.models.tables import has_tables, read_tables

ENDPOINT = {"XDG_RUNTIME_DIR": "/run/user/7"}
FOLDER = "ipc:///run/user/7/lowlat"


def place(name: str, presence: Presence, devices: str = "0", asleep: int = 1, **own: object) -> Place:
    """A model of 10 bytes awake and 1 asleep on each of its devices."""
    names = [f"cuda:{number}" for number in devices]
    made = Place(name, presence, dict.fromkeys(names, 10), dict.fromkeys(names, asleep))
    for field, value in own.items():
        assert hasattr(made, field)
        setattr(made, field, value)
    return made


def test_the_model_used_longest_ago_sleeps_for_one_that_is_asked_for() -> None:
    old, new = place("old", Presence.AWAKE, last_used=1.0), place("new", Presence.AWAKE, last_used=2.0)
    asked = place("asked", Presence.ASLEEP, wanted_since=3.0)
    made = decide([new, old, asked], {"cuda:0": 21}, 3.0, 5.0)
    assert (made.sleeps, made.grants, made.again_at) == (["old"], [], None)
    old.presence = Presence.FALLING
    made = decide([new, old, asked], {"cuda:0": 21}, 3.1, 5.0)
    assert (made.sleeps, made.grants) == ([], [])  # its memory is on its way
    old.presence = Presence.ASLEEP
    assert decide([new, old, asked], {"cuda:0": 20}, 3.2, 5.0).grants == []  # 12 are held, and 9 more are not there
    assert decide([new, old, asked], {"cuda:0": 21}, 3.2, 5.0).grants == ["asked"]


def test_one_with_requests_sleeps_only_after_patience_and_last() -> None:
    busy = place("busy", Presence.AWAKE, idle=False, last_used=0.0)
    asked = place("asked", Presence.ASLEEP, wanted_since=3.0)
    made = decide([busy, asked], {"cuda:0": 12}, 4.0, 5.0)
    assert (made.sleeps, made.again_at) == ([], 8.0)
    assert decide([busy, asked], {"cuda:0": 12}, 8.0, 5.0).sleeps == ["busy"]
    idle = place("idle", Presence.AWAKE, last_used=9.0)
    assert decide([busy, idle, asked], {"cuda:0": 22}, 20.0, 5.0).sleeps == ["idle"]
    loading = place("asked", Presence.STARTING, wanted_since=3.0, asleep=10)
    assert decide([busy, loading], {"cuda:0": 12}, 9.0, 5.0).again_at == 33.0  # nobody asked for it


def test_wakes_go_before_loads_and_in_order() -> None:
    load = place("load", Presence.STARTING, wanted_since=1.0, asleep=10)
    first, second = (place(name, Presence.ASLEEP, wanted_since=since) for name, since in (("b", 2.0), ("a", 3.0)))
    assert decide([load, second, first], {"cuda:0": 29}, 4.0, 5.0).grants == ["b", "a"]
    assert decide([load, second, first], {"cuda:0": 29}, 40.0, 5.0).grants == ["load", "b"]  # it has waited for long
    assert decide([load, second, first], {"cuda:0": 12}, 4.0, 5.0).grants == ["b"]
    assert decide([load, second, first], {"cuda:0": 40}, 4.0, 5.0).grants == ["b", "a", "load"]


def test_what_never_fits_is_refused_by_name_and_other_devices_are_left_alone() -> None:
    wide = place("wide", Presence.AWAKE, can_sleep=False)
    asked = place("asked", Presence.ASLEEP, wanted_since=3.0)
    made = decide([wide, asked], {"cuda:0": 19}, 99.0, 5.0)
    assert made.sleeps == [] and "asked needs" in made.refusals["asked"] and "models_gib" in made.refusals["asked"]
    elsewhere = place("elsewhere", Presence.ASLEEP, wanted_since=1.0, devices="1")
    assert decide([wide, asked, elsewhere], {"cuda:0": 19, "cuda:1": 10}, 9.0, 5.0).grants == ["elsewhere"]


def test_a_model_of_several_gpus_has_all_of_them_or_none() -> None:
    one, other = place("one", Presence.AWAKE, last_used=2.0), place("other", Presence.AWAKE, "1", last_used=1.0)
    both = place("both", Presence.ASLEEP, "01", wanted_since=3.0)
    budgets = {"cuda:0": 12, "cuda:1": 12}
    assert decide([one, other, both], {"cuda:0": 12, "cuda:1": 20}, 3.0, 5.0).sleeps == ["one"]
    made = decide([one, other, both], budgets, 3.0, 5.0)
    assert (made.sleeps, made.grants) == (["other", "one"], [])
    one.presence, other.presence = Presence.FALLING, Presence.ASLEEP
    later = place("later", Presence.ASLEEP, "1", wanted_since=4.0)
    elsewhere = place("elsewhere", Presence.ASLEEP, "2", wanted_since=5.0)
    made = decide([one, other, both, later, elsewhere], {**budgets, "cuda:1": 13, "cuda:2": 10}, 5.0, 5.0)
    assert made.grants == ["elsewhere"] and made.sleeps == []  # cuda:1 waits with cuda:0: who asked later comes later
    one.presence = Presence.ASLEEP
    assert decide([one, other, both], budgets, 5.0, 5.0).grants == ["both"]
    both.presence = Presence.AWAKE
    made = decide([one, other, both, place("more", Presence.ASLEEP, "1", wanted_since=9.0)], budgets, 9.0, 5.0)
    assert made.refusals == {} and made.sleeps == ["both"]


def test_nobody_sleeps_for_nothing() -> None:
    small, large = place("small", Presence.AWAKE, last_used=1.0), place("large", Presence.AWAKE, "01", last_used=2.0)
    both = place("both", Presence.ASLEEP, "01", wanted_since=3.0)
    assert decide([small, large, both], {"cuda:0": 22, "cuda:1": 12}, 3.0, 5.0).sleeps == ["large"]
    lasting = place("lasting", Presence.AWAKE, "1", can_sleep=False)
    made = decide([small, lasting, both], {"cuda:0": 12, "cuda:1": 12}, 3.0, 5.0)
    assert made.sleeps == [] and "both needs" in made.refusals["both"] and "cuda:1" in made.refusals["both"]


@pytest.mark.parametrize("devices", [("0",), ("0", "1", "01", "12", "012")], ids=["one", "several"])
def test_no_mix_of_requests_holds_more_than_the_budget_or_lets_one_wait_for_ever(devices: tuple[str, ...]) -> None:
    """Moves of ten models; who is asked for is woken, however others are used."""
    chance = random.Random(5)
    places = [
        place(f"m{number}", Presence.STARTING, devices[number % len(devices)], wanted_since=0.0) for number in range(10)
    ]
    now, budgets = 1.0, {"cuda:0": 40, "cuda:1": 35, "cuda:2": 28}
    for _ in range(4000):
        now += chance.random()
        one = chance.choice(places)
        if one.presence in (Presence.ASLEEP, Presence.FALLING) and one.wanted_since is None and chance.random() < 0.3:
            one.wanted_since = now
        elif one.presence is Presence.AWAKE:
            one.idle, one.last_used = chance.random() < 0.5, now
        elif one.presence is Presence.FALLING:
            one.presence = Presence.ASLEEP
        elif one.presence in (Presence.WAKING, Presence.LOADING):
            one.presence, one.wanted_since, one.last_used = Presence.AWAKE, None, now
        made = decide(places, budgets, now, 2.0)
        assert not made.refusals
        for each in places:
            if each.name in made.sleeps:
                assert each.presence is Presence.AWAKE
                each.presence = Presence.FALLING
            elif each.name in made.grants:
                each.presence = Presence.WAKING if each.presence is Presence.ASLEEP else Presence.LOADING
        for device, budget in budgets.items():
            assert sum(each.held(device) for each in places) <= budget
        waits = [now - each.wanted_since for each in places if each.wanted_since is not None]
        assert max(waits, default=0.0) < 120.0
    assert all(each.presence is not Presence.STARTING for each in places)


def write(tmp_path: Path, text: str) -> Path:
    """A file of settings."""
    file = tmp_path / "serve.toml"
    file.write_text(text)
    return file


def test_tables_lay_their_settings_over_the_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    file = write(
        tmp_path,
        'max_batch = 2\nhttp = "8000"\nbusy_s = 1.5\n[[models]]\nmodel = "a"\n[[models]]\nmodel = "org/b"\n'
        'name = "b/chat"\nmax_batch = 1\ntensor_parallel_size = 2\n',
    )
    assert has_tables(file) and not has_tables(write(tmp_path / "a", "max_batch = 1\n")) and not has_tables(None)
    shared, (first, second) = read_tables({"max_queue": 7}, ENDPOINT, file)
    assert shared["busy_s"] == 1.5 and shared["http"] == "8000"
    assert (first.name, first.endpoint) == ("a", f"{FOLDER}/default.sock")
    assert (second.name, second.endpoint) == ("b/chat", f"{FOLDER}/b_chat.sock")
    assert first.given() == {
        "model": str(tmp_path / "a"),
        "max_batch": 2,
        "max_queue": 7,
        "can_sleep": True,
        "name": "a",
        "endpoint": first.endpoint,
    }
    assert second.given()["max_batch"] == 1 and second.given()["can_sleep"]
    assert json.loads(json.dumps(second.given())) == second.given()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('model = "x"\n[[models]]\nmodel = "a"\n', r"model \(.*serve.toml\) is each model's own"),
        ("[[models]]\nmax_batch = 1\n", r"models\[0\] names no model"),
        ('[[models]]\nmodel = "a"\n[[models]]\nmodel = "a"\n', r"models\[1\]: two models are called 'a'"),
        ('[[models]]\nmodel = "a"\nhttp = "80"\n', r"http is the server's, no model's"),
        ('[[models]]\nmodel = "a"\nmax_bach = 1\n', "unknown setting 'max_bach'; did you mean 'max_batch'"),
        ('[[models]]\nmodel = "a"\nmax_batch = 0\n', "max_batch must be from 1"),
        ('kv_cache_gib = "free"\n[[models]]\nmodel = "a"\n', r"models\[0\]: kv_cache_gib 'free' .* a number of GiB"),
        ("models = 3\n", "models must be tables of settings"),
        ("models = []\n", "models names no model"),
        ('endpoint = "tcp://127.0.0.1:9"\n[[models]]\nmodel = "a"\n', "listen at ipc://"),
    ],
)
def test_tables_that_cannot_be_are_refused(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ConfigError, match=problem):
        read_tables({}, ENDPOINT, write(tmp_path, text))


def test_the_pages_file_is_one(repository: Path, tmp_path: Path) -> None:
    page = (repository / "lowlat" / "serving" / "models" / "README.md").read_text()
    (text,) = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    shared, tables = read_tables({}, ENDPOINT, write(tmp_path, text))
    assert shared["http"] == "8000" and [table.name for table in tables] == ["chat", "code"]
    assert all(table.settings.speculation(None) is not None for table in tables[:1])
    (commands,) = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert {line.split()[1] for line in commands.splitlines()} <= set(COMMANDS)


@pytest.mark.second
def test_the_pages_example_runs(repository: Path) -> None:
    page = (repository / "lowlat" / "serving" / "models" / "README.md").read_text()
    (text,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert "'num_sleeps': 1" in run_example(text, repository)


def test_a_roster_that_may_not_be_read_or_signalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of another user's there is none for this one; a supervisor of another user's runs all the same."""
    endpoint = f"ipc://{tmp_path}/default.sock"
    path = roster_path(endpoint)
    assert path is not None
    Roster(os.getpid(), ()).write(path)

    def forbidden(*_: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", forbidden)
        assert roster_of(endpoint) == path and Roster.read(path).pid == os.getpid()
    monkeypatch.setattr(Path, "read_bytes", forbidden)
    assert roster_of(endpoint) is None


def test_a_roster_is_believed_as_long_as_its_supervisor_lives(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/default.sock"
    path = roster_path(endpoint)
    assert path == tmp_path / "default.models.json" and roster_of(endpoint) is None
    assert roster_path("tcp://127.0.0.1:9") is None
    models = (Listed("a", endpoint, "asleep"), Listed("b", f"{endpoint}b", "failed", "no such directory", 7))
    Roster(os.getpid(), models).write(path)
    assert path.stat().st_mode & 0o077 == 0 and roster_of(endpoint) == path
    found = Roster.read(path)
    assert found.models == models and found.models[0].answers and not found.models[1].answers
    assert found.find("b") == models[1] and found.find("c") is None
    ended = os.fork()
    if not ended:
        os._exit(0)
    os.waitpid(ended, 0)
    Roster(ended, models).write(path)
    with pytest.raises(ServerGone, match="no server of several models"):
        Roster.read(path)
    path.write_text("{")
    assert roster_of(endpoint) is None


def test_a_channel_carries_lines_and_tells_its_end() -> None:
    own, theirs = map(Channel, socket.socketpair())
    for number in range(3):
        assert own.send({"number": number, "text": "x" * 20_000})
    found: list[dict[str, object]] = []
    while len(found) < 3:
        found += theirs.receive()
    assert [each["number"] for each in found] == [0, 1, 2]
    own.close()
    assert list(theirs.messages()) == [] and theirs.closed and not theirs.send({"number": 4})
    theirs.close()
