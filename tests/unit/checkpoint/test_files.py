"""Small files from elsewhere: what is read, and what is refused instead of waited for or read whole."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowlat.checkpoint.files import find_bytes, find_text, read_bytes, read_json, read_text
from lowlat.errors import ConfigError

ALL: list[Callable[[Path, int], Any]] = [find_bytes, find_text, read_bytes, read_json, read_text]


def test_files_are_read_up_to_their_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text('["ä"]')
    assert find_bytes(path, 6) == read_bytes(path, 6) == '["ä"]'.encode()
    assert find_text(path, 6) == read_text(path, 6) == '["ä"]'
    assert read_json(path, 6) == ["ä"]
    for read in ALL:
        with pytest.raises(ConfigError, match=r"file: is larger than 5 bytes"):
            read(path, 5)


def test_only_some_do_without_a_file(tmp_path: Path) -> None:
    path = tmp_path / "absent"
    assert find_bytes(path, 1) is None
    assert find_text(path, 1) is None
    for read in (read_bytes, read_text, read_json):
        with pytest.raises(ConfigError, match="absent: no such file"):
            read(path, 1)


@pytest.mark.timeout(20)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, message in (("pipe", "not a regular file"), ("", "not a regular file"), ("loop", "cannot be read"),
                          ("a\0b", "is not a path")):  # fmt: skip
        for read in ALL:
            with pytest.raises(ConfigError, match=message):
                read(tmp_path / name, 100)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"ab\xff")
    assert read_bytes(path, 3) == b"ab\xff"
    for read in (find_text, read_text, read_json):
        with pytest.raises(ConfigError, match="file: is not UTF-8: byte 2"):
            read(path, 3)
    for text in ("[1,", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ConfigError, match="file: is not valid JSON"):
            read_json(path, 100_000)
