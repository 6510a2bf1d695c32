"""A bounded, seeded share of the decoder's fuzzing; fuzz_decoder.py does the long runs."""

import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType

import pytest

NUM_MUTATED = 30_000


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    """The fuzzer's module; it is a script, and no part of a package."""
    spec = importlib.util.spec_from_file_location("fuzz_decoder", Path(__file__).parent / "fuzz_decoder.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_corpus_holds_messages_and_others(fuzz: ModuleType) -> None:
    inputs = list(fuzz.corpus())
    good = sum(fuzz.check(data) for data in inputs)
    assert good >= 25
    assert len(inputs) - good >= 300


@pytest.mark.parametrize("seed", [1, 2])
def test_mutations_are_messages_or_wire_errors(fuzz: ModuleType, seed: int) -> None:
    chooser = random.Random(seed)
    inputs = list(fuzz.corpus())
    good = sum(fuzz.check(fuzz.mutate(chooser.choice(inputs), chooser)) for _ in range(NUM_MUTATED))
    assert 0 < good < NUM_MUTATED


def test_mutations_of_messages_alone(fuzz: ModuleType) -> None:
    chooser = random.Random(3)
    inputs = [data for data in fuzz.corpus() if fuzz.check(data)]
    for _ in range(NUM_MUTATED):
        fuzz.check(fuzz.mutate(chooser.choice(inputs), chooser))


def test_the_long_run_is_on_record(repository: Path) -> None:
    figures = json.loads((repository / "bench" / "results" / "cpu" / "fuzz_decoder.json").read_text())
    assert figures["executions"] >= 1_000_000
    assert figures["faults"] == 0
