"""The limits of kernels that norm, rotate and combine rows."""

from collections.abc import Mapping

from lowlat.kernels.common.limits import Asked, Excess, Limit, OnlyParam, Rule, Size

__all__ = ["CHUNKS", "LAYER_INPUTS", "LIMITS", "MAX_WIDTH", "MOST_HEAD", "NORMED_HEAD", "ROW_WIDTH", "TURNED"]

MAX_WIDTH = 65536
ROW_WIDTH = Limit(multiple=8, most=MAX_WIDTH)  # of rows that a block holds, to norm or to copy them
MOST_HEAD, WIDE_HEAD = 256, 512  # up to which a lane of a warp has 8 elements of a head, and at which it has 16
NORMED_HEAD = Limit(
    (*range(8, MOST_HEAD + 1, 8), WIDE_HEAD), words=f"a multiple of 8, at most {MOST_HEAD}, or {WIDE_HEAD}"
)
LAYER_INPUTS = Limit(multiple=8, most=2048)  # numbers of a row that are a layer's own, which a warp holds
CHUNKS = Limit(multiple=8)  # elements that go through in chunks of 16 bytes
TURNED = Limit(multiple=8)  # dimensions of a head that turn


def _turns_whole(asked: Asked) -> Excess | None:
    """Wide heads turn as a whole."""
    dim, turning = asked.sizes["D"], 2 * asked.sizes["R"]
    return None if dim <= MOST_HEAD or turning == dim else Excess("rotary dimensions of a head", str(dim), turning)


_HIDDEN = Size("N", ROW_WIDTH, "hidden_size")
LIMITS: Mapping[str, tuple[Rule, ...]] = {
    "add": (Size("M * N", CHUNKS, "hidden_size times rows"),),
    "add_gated": (Size("N", CHUNKS, "hidden_size"),),
    "cast": (Size("M * N", CHUNKS, "hidden_size times rows"),),
    "concat_norms": (_HIDDEN,),
    "embed": (Size("N", ROW_WIDTH, "width of embeddings (hidden_size)"),),
    "output_gate": (Size("H * D", CHUNKS, "heads' width"),),
    "per_layer_gate": (Size("P", CHUNKS, "inputs of a layer"),),
    "per_layer_inputs": (Size("P", LAYER_INPUTS, "inputs of a layer"),),
    "qk_norm": (Size("head_dim", NORMED_HEAD, "head_dim"),),
    "rms_norm": (_HIDDEN,),
    "rope": (Size("D", NORMED_HEAD, "head_dim"), Size("2 * R", TURNED, "rotary dimensions of a head"), _turns_whole),
    "scale": (Size("M * N", CHUNKS, "hidden_size times rows"),),
    "silu_mul": (Size("I", CHUNKS, "intermediate_size"), OnlyParam("activation", ("silu", "gelu_tanh"))),
    "split_norms": (Size("Ht", ROW_WIDTH, "hidden_size"),),
}
