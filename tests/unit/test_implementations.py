"""The table of implementations: which one lowers an operation on which GPU, and which plans they have."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lowlat.errors import ConfigError
from lowlat.kernels.toolchain.kernel import H200
from lowlat.lowering.implementations import Implementation, lower_by
from lowlat.lowering.operations import OPERATIONS
from lowlat.tools.tune.shapes import KINDS

OP: Any = SimpleNamespace(kind="linear")
BLACKWELL = replace(H200, capability=(10, 0))


def binding(gpu: Any) -> Any:
    return SimpleNamespace(gpu=gpu, program=SimpleNamespace(name="step"))


def named(name: str, *, capability: tuple[int, int] | None = None, small: bool = True) -> Implementation:
    """An implementation that tells its name in place of calls, of one capability or of all."""
    lowered: Any = lambda _binding, _op: [name]  # noqa: E731
    return Implementation(name, lowered, lambda gpu: capability in (None, gpu.capability), lambda _binding, _op: small)


def test_the_first_that_covers_an_operation_on_a_gpu_lowers_it() -> None:
    table = (named("tcgen05", capability=(10, 0)), named("wgmma", capability=(9, 0), small=False), named("library"))
    assert list(lower_by(table, binding(BLACKWELL), OP)) == list[Any](["tcgen05"])
    assert list(lower_by(table, binding(H200), OP)) == list[Any](["library"]), "another covers the sizes"
    with pytest.raises(ConfigError, match=r"step: operation linear has no kernel for capability \(9, 0\) .* wgmma\)"):
        lower_by(table[:2], binding(H200), OP)


def test_every_kind_of_plan_that_is_tuned_is_some_implementations() -> None:
    """`experts_mlp` has one operation more than any implementation: it is a fusion's."""
    plans = {plan for table in OPERATIONS.values() for each in table for plan in each.plans}
    assert plans | {"experts_mlp"} == {kind for kinds in KINDS.values() for kind in kinds}
    for kind, table in OPERATIONS.items():
        assert table and len({each.name for each in table}) == len(table), kind


def test_a_weight_has_one_form_for_all_implementations_of_an_operation() -> None:
    """A weight is placed once, so a step and a prompt read it alike."""
    for kind, table in OPERATIONS.items():
        assert len({each.packs for each in table}) == 1, kind
    assert OPERATIONS["linear"][0].packs == ("weight",)
