"""This module lowers gated delta nets in a step: the rule alone, or fused with the convolution and the gated norm."""

from collections.abc import Sequence

from lowlat.graphs.program import Op
from lowlat.kernels.recurrent.delta_rule import delta_rule, gated_delta, joins_blocks
from lowlat.kernels.recurrent.delta_step import HeadSizes
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.lowering.binding import Binding, Call
from lowlat.lowering.fusion import Fusion, Run

__all__ = ["RECURRENT_FUSIONS", "rule_alone"]

# arguments that the rule's kernel may read before it waits, if the kernel before it does not write them
LENGTHS = ("slots", "dense_lens", "state_lens", "row_live")


def rule_alone(binding: Binding, op: Op) -> Sequence[Call]:
    """The calls of `delta_rule`."""
    return delta_rule(**binding.arguments(op), **binding.vectors(op), early=_is_settled(binding, op))


def _is_settled(binding: Binding, *ops: Op) -> bool:
    """Whether the kernel before these operations writes neither their lengths nor their states."""
    known = [op.reads[name] for op in ops for name in LENGTHS]
    states = [buffer for op in ops for name, buffer in op.writes.items() if name != "out"]
    return binding.fresh.keys().isdisjoint((*known, *states))


def _convolves(run: Run, gpu: Gpu) -> bool:
    """Whether each operation reads the output of the one before it, over the same rows, and one kernel supports all."""
    conv, rule, norm = run.op("delta_conv"), run.op("delta_rule"), run.find("delta_norm")
    if rule.reads["mixed"] != conv.writes["out"] or any(conv.reads[name] != rule.reads[name] for name in LENGTHS):
        return False
    if norm is None:
        return True
    (_, value_heads, value_dim, key_dim), key_heads = (
        run.shape(rule.writes["state"]),
        run.shape(rule.writes["pending_k"])[2],
    )
    return (
        norm.reads["x"] == rule.writes["out"]
        and norm.reads["gates"] == conv.reads["x"]
        and norm.reads.get("row_live") == rule.reads["row_live"]
        and joins_blocks(HeadSizes(key_heads, value_heads, key_dim, value_dim), gpu)
    )


def _between(run: Run) -> list[str]:
    """The buffers that the kernel does not write: the convolution's output, and the rule's if it is normed."""
    mixed = run.op("delta_conv").writes["out"]
    return [mixed] if run.find("delta_norm") is None else [mixed, run.op("delta_rule").writes["out"]]


def _gated_delta(binding: Binding, run: Run) -> Sequence[Call]:
    conv, rule, norm = run.op("delta_conv"), run.op("delta_rule"), run.find("delta_norm")
    given = {**binding.arguments(conv), **binding.vectors(conv)}
    del given["out"]
    given |= {**binding.arguments(rule), **binding.vectors(rule)}
    del given["mixed"]
    if norm is not None:
        normed = binding.arguments(norm)
        given |= {"out": normed["out"], "eps": normed["eps"]}
        given["norm_weight"] = binding.weights.vector(norm.weights["weight"])
    return gated_delta(**given, early=_is_settled(binding, conv, rule))


RECURRENT_FUSIONS = (
    Fusion("gated_delta+norm", "delta_conv delta_rule delta_norm", 2, _gated_delta, _convolves, _between),
    Fusion("gated_delta", "delta_conv delta_rule", 1, _gated_delta, _convolves, _between),
)
