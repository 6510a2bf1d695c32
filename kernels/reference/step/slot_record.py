"""This module numbers the columns of a slot's record, which the host writes when a request joins.

`slot_ints` [max B, NUM_INTS] int64 and `slot_floats` [max B, NUM_FLOATS] float32 have one row a slot. Operations,
kernels and the host all use these numbers.
"""

__all__ = [
    "DRAFT_LIMIT",
    "FORCED",
    "FREQUENCY",
    "HAS_GRAMMAR",
    "LENGTH",
    "MASKED",
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

MASKED, FORCED = 1, 2  # values of HAS_GRAMMAR

# slot_ints
LENGTH = 0  # committed tokens when the request joins
MAX_LENGTH = 1  # the most prompt and output tokens
PROMPT_LENGTH = 2
MIN_TOKENS = 3  # output tokens before a stop id may be drawn
TOP_K = 4  # 0 keeps all
SEED = 5  # 64 bits
DRAFT_LIMIT = 6  # the most drafts verified in a step
NUM_LOGPROBS = 7  # number of alternatives; 0: only the drawn token's, -1: no logprobs
HAS_GRAMMAR = 8  # MASKED: the host fills masks for its rows, see `sample`; FORCED: it only forces drafts
NUM_INTS = 9

# slot_floats
TEMPERATURE = 0  # 0 is greedy
TOP_P = 1  # 1 keeps all
MIN_P = 2  # 0 keeps all
REPETITION = 3  # 1 changes nothing
PRESENCE = 4
FREQUENCY = 5
NUM_FLOATS = 6

# capacities of the lists next to the record
MAX_STOPS = 32
MAX_BIASES = 300
MAX_LOGPROBS = 20
