"""A small world for the tests of `sample`: state rows of a few slots, and the operation over any nodes."""

import torch

from lowlat.kernels.reference.sampling.sample import sample
from lowlat.kernels.reference.step.slot_record import (
    FREQUENCY,
    HAS_GRAMMAR,
    MAX_BIASES,
    MAX_STOPS,
    MIN_P,
    MIN_TOKENS,
    NUM_FLOATS,
    NUM_INTS,
    PRESENCE,
    PROMPT_LENGTH,
    REPETITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)

INTS = {
    "prompt_length": PROMPT_LENGTH,
    "min_tokens": MIN_TOKENS,
    "top_k": TOP_K,
    "seed": SEED,
    "has_grammar": HAS_GRAMMAR,
}
MAX_ROWS = 64
FLOATS = {
    "temperature": TEMPERATURE,
    "top_p": TOP_P,
    "min_p": MIN_P,
    "repetition": REPETITION,
    "presence": PRESENCE,
    "frequency": FREQUENCY,
}


class World:
    """State of `num_slots` requests over a vocabulary; greedy and unprocessed until `set` says otherwise."""

    def __init__(self, vocabulary: int, num_slots: int = 4, device: str = "cpu") -> None:
        self.vocabulary, self.device = vocabulary, device
        self.lengths = torch.full((num_slots,), 10, dtype=torch.int32)
        self.ints = torch.zeros(num_slots, NUM_INTS, dtype=torch.int64)
        self.floats = torch.zeros(num_slots, NUM_FLOATS)
        self.floats[:, TOP_P] = 1.0
        self.floats[:, REPETITION] = 1.0
        self.prompt_seen = torch.zeros(num_slots, vocabulary, dtype=torch.uint8)
        self.output_counts = torch.zeros(num_slots, vocabulary, dtype=torch.int32)
        self.bias_ids = torch.full((num_slots, MAX_BIASES), -1, dtype=torch.int32)
        self.bias_values = torch.full((num_slots, MAX_BIASES), float("nan"))
        self.stop_ids = torch.full((num_slots, MAX_STOPS), -1, dtype=torch.int32)
        self.grammar_masks = torch.zeros(num_slots, MAX_ROWS, -(-vocabulary // 32), dtype=torch.int32)
        self.grammar_ready = torch.zeros(num_slots, dtype=torch.int64)

    def set(self, slot: int, **options: float) -> None:
        """Set columns of a slot's record by name, `length` among them."""
        for name, value in options.items():
            if name == "length":
                self.lengths[slot] = int(value)
            elif name in INTS:
                self.ints[slot, INTS[name]] = int(value)
            else:
                self.floats[slot, FLOATS[name]] = value

    def bias(self, slot: int, values: dict[int, float], first: int = 0) -> None:
        """Put biases into the columns from `first` on."""
        for column, (token, value) in enumerate(values.items(), first):
            self.bias_ids[slot, column], self.bias_values[slot, column] = token, value

    def mask(self, slot: int, allowed: torch.Tensor) -> None:
        """Give a slot a grammar that allows some tokens, [MAX_ROWS, V] bool or fewer rows: masks and their length."""
        rows, width = allowed.shape[0], self.grammar_masks.shape[2]
        bits = torch.zeros(rows, width * 32, dtype=torch.int64)
        bits[:, : self.vocabulary] = allowed
        words = (bits.view(rows, width, 32) << torch.arange(32)).sum(-1)
        self.grammar_masks[slot, :rows] = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
        self.set(slot, has_grammar=1)
        self.grammar_ready[slot] = self.lengths[slot]

    def state(self) -> dict[str, torch.Tensor]:
        """The state's arrays on the CPU, by the names and in the order of `sample`'s arguments."""
        named = {"lengths": self.lengths, "slot_ints": self.ints, "slot_floats": self.floats}
        names = (
            "prompt_seen",
            "output_counts",
            "bias_ids",
            "bias_values",
            "stop_ids",
            "grammar_masks",
            "grammar_ready",
        )
        return named | {name: getattr(self, name) for name in names}

    def draw(
        self,
        logits: torch.Tensor,
        slots: list[int],
        tokens: list[list[int]] | None = None,
        masks: list[list[int]] | None = None,
        live: list[list[int]] | None = None,
    ) -> list[list[int]]:
        """Run the operation over logits [B * T, V]; without more, T root nodes of which only masks differ: a chain."""
        batch = len(slots)
        rows = logits.shape[0] // batch
        tokens = tokens or [[0] * rows] * batch
        masks = masks or [[(1 << (node + 1)) - 1 for node in range(rows)]] * batch
        live = live or [[1] * rows] * batch
        out = torch.full((batch, rows), 987654, dtype=torch.int32, device=self.device)
        flags, ids = torch.tensor(live, dtype=torch.uint8).reshape(-1), torch.tensor(tokens, dtype=torch.int32)
        bits, rows_of = torch.tensor(masks, dtype=torch.int64), torch.tensor(slots, dtype=torch.int32)
        arrays = (logits, flags, ids, bits, rows_of, *self.state().values())
        sample(*(array.to(self.device) for array in arrays), target_tokens=out)
        result: list[list[int]] = out.tolist()
        return result
