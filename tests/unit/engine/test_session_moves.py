"""Any order of submit, grow, step, cancel, fork, end, save and load: no request has other tokens than it has alone."""

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from session_moves import Alone, Moves, make_model

SMALL = st.integers(0, 30)


def test_no_move_changes_a_token(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = tmp_path_factory.mktemp("moves")
    model = make_model(folder / "target")
    alone = Alone(model)
    moves = Moves(model, alone, folder)  # loaded once: each example leaves nothing live

    class Machine(RuleBasedStateMachine):
        @rule(base=SMALL, length=SMALL, most=st.integers(1, 6), seed=st.integers(0, 3), which=SMALL, on=st.booleans())
        def submit(self, base: int, length: int, most: int, seed: int, which: int, on: bool) -> None:
            moves.submit(base, length, most, seed, which, goes_on=on)

        @rule(base=SMALL, length=SMALL, most=st.integers(1, 6), seed=st.integers(0, 3), which=SMALL, on=st.booleans())
        def begin(self, base: int, length: int, most: int, seed: int, which: int, on: bool) -> None:
            moves.begin(base, length, most, seed, which, goes_on=on)

        @rule(which=SMALL, count=st.integers(1, 9))
        def grow(self, which: int, count: int) -> None:
            moves.grow(which, count)

        @rule(which=SMALL)
        def guess(self, which: int) -> None:
            moves.guess(which)

        @rule(count=st.integers(1, 4))
        def step(self, count: int) -> None:
            for _ in range(count):
                moves.step()

        @rule(which=SMALL)
        def cancel(self, which: int) -> None:
            moves.cancel(which)

        @rule()
        def open(self) -> None:
            moves.open()

        @rule(which=SMALL)
        def fork(self, which: int) -> None:
            moves.fork(which)

        @rule(which=SMALL)
        def close(self, which: int) -> None:
            moves.close(which)

        @rule(which=SMALL)
        def save(self, which: int) -> None:
            moves.save(which)

        @invariant()
        def balanced(self) -> None:
            moves.check()

        def teardown(self) -> None:
            moves.end()

    run_state_machine_as_test(Machine, settings=settings(max_examples=12, stateful_step_count=30, deadline=None))
    moves.runtime.close()
    alone.runtime.close()
