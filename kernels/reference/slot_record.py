"""Columns of a slot's record, shared by the host that writes it and the operations that read it."""

__all__ = [
    "DRAFT_LIMIT",
    "FREQUENCY",
    "LENGTH",
    "MAX_BIASES",
    "MAX_LENGTH",
    "MAX_LOGPROBS",
    "MAX_STOPS",
    "MIN_P",
    "MIN_TOKENS",
    "NUM_FLOATS",
    "NUM_INTS",
    "NUM_LOGPROBS",
    "PRESENCE",
    "PROMPT_LENGTH",
    "REPETITION",
    "SEED",
    "TEMPERATURE",
    "TOP_K",
    "TOP_P",
]

# int64
LENGTH, MAX_LENGTH, PROMPT_LENGTH, MIN_TOKENS, TOP_K, SEED, DRAFT_LIMIT, NUM_LOGPROBS, NUM_INTS = range(9)

# float32
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, NUM_FLOATS = range(7)

# fixed capacities: the model's end tokens and the request's stops share MAX_STOPS
MAX_STOPS, MAX_BIASES, MAX_LOGPROBS = 32, 300, 20
