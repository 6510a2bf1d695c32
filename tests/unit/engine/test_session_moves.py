"""Any order of submit, step, pause, resume, cancel, open prompts, fork, end, save and load: no request's tokens differ
from those it has alone."""

from pathlib import Path

import pytest
from benches import bench
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

made = bench("session_moves")
SMALL = st.integers(0, 30)
PRIORITY, SEED = st.integers(0, 2), st.integers(0, 1)


def test_no_move_changes_a_token(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = tmp_path_factory.mktemp("moves")
    model = made.make_model(folder / "target")
    alone = made.Alone(model)
    moves = made.Moves(model, alone, folder)  # loaded once: each example leaves nothing live

    class Machine(RuleBasedStateMachine):
        @rule(
            base=SMALL, length=SMALL, most=st.integers(1, 6), seed=SEED, which=SMALL, on=st.booleans(), above=PRIORITY
        )
        def submit(self, base: int, length: int, most: int, seed: int, which: int, on: bool, above: int) -> None:
            moves.submit(base, length, most, seed, which, goes_on=on, priority=above)

        @rule(count=st.integers(1, 4))
        def step(self, count: int) -> None:
            for _ in range(count):
                moves.step()

        @rule(which=SMALL)
        def pause(self, which: int) -> None:
            moves.pause(which)

        @rule(which=SMALL)
        def resume(self, which: int) -> None:
            moves.resume(which)

        @rule(which=SMALL)
        def cancel(self, which: int) -> None:
            moves.cancel(which)

        @rule(base=SMALL, most=st.integers(1, 6), seed=SEED, which=SMALL, above=PRIORITY)
        def open_prompt(self, base: int, most: int, seed: int, which: int, above: int) -> None:
            moves.open_prompt(base, most, seed, which, above)

        @rule(which=SMALL, count=st.integers(1, 9))
        def append(self, which: int, count: int) -> None:
            moves.append(which, count)

        @rule(which=SMALL, on_trial=st.booleans())
        def finish(self, which: int, on_trial: bool) -> None:
            moves.finish(which, on_trial=on_trial)

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

    run_state_machine_as_test(Machine, settings=settings(max_examples=8, stateful_step_count=30))
    moves.runtime.close()
    alone.runtime.close()
