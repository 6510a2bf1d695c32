"""Small targets in every weight format, with a draft model of every method that ranks can share."""

from pathlib import Path
from typing import Any

from quantised_layers import quantise_target
from tiny_dflash import dflash_draft_model
from tiny_models import copying_draft_model, make_target, mxfp4_target
from tiny_mtp import add_mtp

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
}
HYBRID: dict[str, Any] = SIZES | {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
CUT: dict[str, Any] = {"intermediate_size": 64, "num_hidden_layers": 2}
STORED = {"awq": "awq", "nvfp4": "nvfp4"}  # of weight formats, the layout that holds them
GAIN = 0.45
SECOND = ("bfloat16", "int4", "nvfp4")  # weights of targets before which DFlash's draft model is DFlash2's


class DraftingModels:
    """Directories of targets by weight format, and of draft models by target and method; made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[str, tuple[Path, Any]] = {}

    def target(self, weights: str, method: str = "none") -> Path:
        """A target whose files hold these weights; formats that are made at load have a plain one's. MTP's has a layer
        to draft with in its files, which is often right where they are plain."""
        return self._made(weights)[0] if method != "mtp" else self._hybrid(weights)

    def _hybrid(self, weights: str) -> Path:
        path = self._folder / "hybrid" / (weights if weights in STORED else "plain")
        if not path.exists():
            make_target(path, "qwen3_5_text", gain=GAIN, **HYBRID)
            add_mtp(path, copies=weights not in STORED)
            if weights in STORED:
                quantise_target(path, STORED[weights], None)
        return path

    def draft_model(self, weights: str, method: str) -> Path:
        """A draft model that is often right about a target, of its tokens but a few; a whole model is the plain target
        itself, or of experts in MXFP4 this very one."""
        if method == "draft_model":
            return self.target(weights if weights == "mxfp4" else "float32")
        second = {"conv": (2, 16), "selector": (8, 6)} if method == "dflash" and weights in SECOND else {}
        path = self.target(weights).parent / (f"{method}2" if second else method)
        if not path.exists():
            model = self._made(weights)[1]
            own = {"draft_vocab_size": 80, **CUT}
            if method == "eagle3":
                copying_draft_model(path, model, heads=8, **own)
            elif method == "peagle":
                copying_draft_model(path, model, heads=8, mask_token=5, **own)
            else:
                markov = {} if method == "dflash" else {"markov_rank": 8}
                shape = {"num_attention_heads": 8, "layout": "speculators", **CUT, **markov, **second}
                dflash_draft_model(path, model, copies=True, **shape)
        return path

    def _made(self, weights: str) -> tuple[Path, Any]:
        kind = weights if weights in (*STORED, "mxfp4") else "plain"
        if kind not in self._models:
            path = self._folder / kind / "target"
            if kind == "mxfp4":
                model = mxfp4_target(path, gain=GAIN, sliding_window=24, **SIZES)
            else:
                model = make_target(path, "llama", gain=GAIN, **SIZES)
            if kind in STORED:
                quantise_target(path, STORED[kind], None)
            self._models[kind] = path, model
        return self._models[kind]
