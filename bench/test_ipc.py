"""First and later tokens over ipc next to the engine alone (`bench/serving.py` says how), and the codec's part of them.

Samples of a case are the blocking client's first tokens. The limit of the first token is checked where the machine has
nothing else to do and the cores stay awake, for requests in a row with a short step; elsewhere it is reported alone.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.host_conditions import host_conditions
from bench.samples import MEASURED, record
from bench.serving import Case, served
from lowlat.ipc.wire import Submit, Tokens, decode_client, decode_server, encode, pack_tokens

WARMUP = 3
FIRST_RATIO, LATER_US = 2.0, 150.0  # over what a bare pair adds; us
AWAKE_S = 0.005
QUIET = os.getloadavg()[0] < 0.3  # before this suite adds to it
TOKENS = 5
ROUNDS = {  # (step, s; streams; in a row): rounds
    (0.002, 1, 10): 40,
    (0.002, 1, 1): 300,
    (0.002, 4, 1): 60,
    (0.002, 16, 1): 60,
    (0.020, 1, 10): 6,
    (0.020, 1, 1): 60,
    (0.020, 4, 1): 20,
    (0.020, 16, 1): 20,
}


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    """The measurement; written where --serving-out says, with how busy the machine was before and after."""
    result = host_conditions()
    measured: list[dict[str, Any]] = []
    yield measured
    out: Path | None = request.config.getoption("--serving-out")
    if out is not None and measured:
        result["load_average_after"] = host_conditions()["load_average"]
        result["rows"] = measured
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


@pytest.fixture(scope="module", params=[0.002, 0.020], ids=["2ms", "20ms"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, float]]:
    folder = tmp_path_factory.mktemp("s")
    folder.chmod(0o700)
    with served(folder, request.param) as endpoint:
        yield endpoint, request.param


@MEASURED
@pytest.mark.parametrize(("num_streams", "in_a_row"), [(1, 10), (1, 1), (4, 1), (16, 1)])
def test_what_serving_adds(
    server: tuple[str, float],
    num_streams: int,
    in_a_row: int,
    rows: list[dict[str, Any]],
    benchmark: BenchmarkFixture,
    tmp_path: Path,
) -> None:
    endpoint, step_s = server
    with Case(tmp_path, endpoint, step_s, num_streams, in_a_row, TOKENS) as case:
        for _ in range(WARMUP):
            case.round()
        case.clear()
        for _ in range(ROUNDS[step_s, num_streams, in_a_row]):
            case.round()
        row = case.row()
        first_ms = [stream[0] / 1e3 for times in case.times["blocking"] for stream in times]
    rows.append(row)
    record(benchmark, first_ms, row)
    if num_streams == 1:
        assert row["blocking"]["later_added_us"]["p50"] <= LATER_US
        if in_a_row > 1 and step_s < AWAKE_S and QUIET:
            assert row["blocking"]["first_ratio"] <= FIRST_RATIO


def test_codec_of_tokens(benchmark: BenchmarkFixture) -> None:
    """A step's tokens of one request, encoded and decoded."""
    said = Tokens(number=7, sequence=11, token_ids=pack_tokens([40, 41, 42]), text=" of the people")
    assert benchmark(lambda: decode_server(encode(said))) == said


def test_codec_of_a_prompt(benchmark: BenchmarkFixture) -> None:
    """A request of 8192 token ids, packed, encoded, decoded and checked."""
    tokens = list(range(8192))

    def through() -> bytes:
        return decode_client([encode(Submit(number=1, credit=64)), pack_tokens(tokens)])[1]

    assert len(benchmark(through)) == 4 * len(tokens)
