"""The schema of `bench.draft_passes`' file: conditions, and a row for each method and depth."""

import msgspec

from lowlat.tools.bench.results import Spread

__all__ = ["DraftPass", "DraftPassesFile", "PassBytes", "Setup", "Stamps"]


class Stamps(msgspec.Struct, frozen=True, kw_only=True):
    """The code and the machine, see `bench.conditions.stamps_of`."""

    commit: str
    card: str
    driver: str
    torch: str
    cuda: str


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions of all rows.

    simulated             what was not measured on real weights, prompts or acceptance
    floor_gb_per_s        bandwidth of the floors
    wall_gb_per_s         the card's bandwidth for reading, measured in the same run; None without a card
    """

    geometry: str
    batch: int
    context: int
    simulated_accept_length: float
    simulated: tuple[str, ...]
    replays: int
    floor_gb_per_s: float
    wall_gb_per_s: float | None


class PassBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a draft pass must move.

    A weight counts once for each number of drafted tokens that products with it wait for: once in a pass that drafts
    all at once, S times in a chain.

    layers    of fc, norms and layers
    lm_head   of the LM head, the target's where the draft model has none
    markov    of DSpark's Markov head
    kv        keys and values of the context, of all its layers, each time that they are attended to
    appended  keys and values that are written
    read      by the launches as they are: weights each time that one of them uses them, and `kv`
    """

    layers: int
    lm_head: int
    markov: int
    kv: int
    appended: int
    read: int

    @property
    def total(self) -> int:
        """All of it, `read` left out."""
        return self.layers + self.lm_head + self.markov + self.kv + self.appended


class DraftPass(msgspec.Struct, frozen=True, kw_only=True):
    """One method's draft pass at one depth, ms.

    launches            of a pass; None where no kernels run
    step                the whole step: verify, accept, commit, draft, publish
    rest                the same launches without the pass's
    alone               the pass's launches, as a graph of their own, one replay behind the other
    pass_ms             the median step less the median rest
    recorded_ms         time of the pass in steps that a profiler recorded, by launches; None where no kernels run
    recorded_step_ms    of those steps, which the profiler makes longer
    floor_ms            the bytes at the file's `floor_gb_per_s`
    over_floor          `pass_ms` over it
    over_measured_floor `pass_ms` over the bytes at the measured bandwidth; None without a card
    """

    method: str
    num_speculative_tokens: int
    draft_layers: int
    draft_vocab_size: int
    launches: int | None
    step: Spread
    rest: Spread
    alone: Spread
    pass_ms: float
    recorded_ms: float | None
    recorded_step_ms: float | None
    bytes: PassBytes
    floor_ms: float
    over_floor: float
    over_measured_floor: float | None


class DraftPassesFile(msgspec.Struct, kw_only=True, tag="draft-passes", tag_field="kind"):
    """The file: conditions and rows."""

    version: int = 1
    setup: Setup
    stamps: Stamps
    rows: list[DraftPass] = []
