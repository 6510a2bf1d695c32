"""The limits of the gated delta net's kernels."""

from collections.abc import Mapping

from lowlat.kernels.common.limits import Asked, Excess, Limit, Rule, Size

__all__ = ["KEY_DIM", "LIMITS", "NORMED_DIM", "TAPS", "VALUE_DIM", "part_columns"]

TAPS = 4  # inputs of the convolution
PART = 32  # columns of a head that a block has, at most
PARTS = 8  # blocks of a head, at most


def part_columns(value_dim: int) -> int:
    """The columns of a head that one block has and whose squares are summed first: the most that divide a head."""
    return next(columns for columns in (PART, 16, 8, 1) if value_dim % columns == 0)


KEY_DIM = Limit(multiple=32, most=128)  # of which the lanes of a warp have four rows each
VALUE_DIM = Limit(
    tuple(dim for dim in range(8, PART * PARTS + 1, 8) if dim // part_columns(dim) <= PARTS),
    words=f"a multiple of 8, at most {PART * PARTS} and {PARTS} times 8, 16 or 32",
)
NORMED_DIM = Limit(multiple=8, most=1024)


def _heads(asked: Asked) -> Excess | None:
    key_heads, value_heads = asked.sizes.get("Hk"), asked.sizes["Hv"]
    if not key_heads or value_heads % key_heads == 0:
        return None
    return Excess("linear_num_value_heads", f"a multiple of {key_heads} key heads", value_heads)


_CONVOLUTION: tuple[Rule, ...] = (
    Size("taps", Limit((TAPS,)), "linear_conv_kernel_dim"),
    Size("C", Limit(multiple=4), "channels of the convolution"),
)
_RULE: tuple[Rule, ...] = (
    Size("Dk", KEY_DIM, "linear_key_head_dim"),
    Size("Dv", VALUE_DIM, "linear_value_head_dim"),
    _heads,
)
LIMITS: Mapping[str, tuple[Rule, ...]] = {
    "delta_conv": _CONVOLUTION,
    "delta_norm": (Size("Dv", NORMED_DIM, "linear_value_head_dim"),),
    "delta_rule": _RULE,
    "prefill_delta_conv": _CONVOLUTION,
    "prefill_delta_rule": _RULE,
}
