"""This module reads scenarios and gates, which are measurements declared in TOML, and makes their cases."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from lowlat.errors import ConfigError
from lowlat.options.runtime import MAX_BATCH
from lowlat.options.speculative import MAX_SPECULATIVE_TOKENS

__all__ = ["SHIPPED", "Case", "Gate", "Plan", "Scenario", "read_plan"]

SHIPPED = Path(__file__).parent / "scenarios.toml"

Context = Annotated[int, Meta(ge=1, le=1 << 20)]
Batch = Annotated[int, Meta(ge=1, le=MAX_BATCH)]
Depth = Annotated[int, Meta(ge=0, le=MAX_SPECULATIVE_TOKENS)]
Policy = Literal["fixed", "auto"]
Level = Literal["micro", "full"]
Target = Literal["dense", "experts"]
Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Positive = Annotated[float, Meta(gt=0)]


class Case(msgspec.Struct, frozen=True):
    """One row of a scenario: `batch` requests of `context` tokens each, S draft tokens deep.

    policy  auto: each step chooses how many, from none to S
    """

    context: Context
    batch: Batch
    num_speculative_tokens: Depth
    policy: Policy = "fixed"

    @property
    def depth(self) -> str:
        """S, in the form of the option `-S`."""
        return str(self.num_speculative_tokens) if self.policy == "fixed" else self.policy

    @property
    def name(self) -> str:
        """For instance `1 x 8K, S=3`."""
        context = f"{self.context // 1024}K" if self.context % 1024 == 0 else str(self.context)
        return f"{self.batch} x {context}, S={self.depth}"


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cases and sizes that one result file measures; an S of auto is a width that each step chooses.

    steps          timed steps of a repeat; with churn the tokens of the longest request
    warm_up        steps before them
    traffic        steady: all requests decode side by side; churn: they come, go and are cancelled
    reuse_prompts  share keys and values of prompts between repeats and cases; each prompt is read before any request
                   decodes, and is timed if nothing of it was read before, as in the largest case
    kv_share       the share of a runtime's KV blocks that its requests take
    alike          a repeat with other tokens than the first is an error; for steady traffic
    gated          require the gates of its own file; a scenario with drafts at a context of the shipped plan's gated
                   scenarios requires the shipped gates in any case
    """

    contexts: Annotated[tuple[Context, ...], Meta(min_length=1)]
    batches: Annotated[tuple[Batch, ...], Meta(min_length=1)]
    num_speculative_tokens: Annotated[tuple[Depth | Literal["auto"], ...], Meta(min_length=1)]
    help: str = ""
    steps: Count = 400
    warm_up: Count = 16
    repeats: Annotated[int, Meta(ge=1, le=100)] = 3
    traffic: Literal["steady", "churn"] = "steady"
    reuse_prompts: bool = False
    gated: bool = False
    kv_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    alike: bool = False

    def cases(self) -> list[Case]:
        """Return all rows: those of one draft length together, the largest first."""
        sizes = sorted(((c, b) for c in set(self.contexts) for b in set(self.batches)), key=_size, reverse=True)
        own = dict.fromkeys(self.num_speculative_tokens)
        depths: list[tuple[int, Policy]] = [
            (MAX_SPECULATIVE_TOKENS, "auto") if isinstance(depth, str) else (depth, "fixed") for depth in own
        ]
        return [Case(c, b, depth, policy) for depth, policy in depths for c, b in sizes]

    @property
    def drafts(self) -> bool:
        """Whether some case has drafts."""
        return any(depth != 0 for depth in self.num_speculative_tokens)

    @property
    def longest_drafted(self) -> int:
        """The longest context with drafts; 0 without drafts."""
        return max(self.contexts) if self.drafts else 0

    def measuring(self) -> "Scenario":
        """The conditions of measurement: equal for scenarios whose rows can be in one file."""
        return msgspec.structs.replace(self, contexts=(), batches=(), num_speculative_tokens=(), help="")


class Gate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measurement that large scenarios require first: it compares a draft length with no drafts.

    num_speculative_tokens  the draft length that is judged
    policy               auto: judge steps that choose their draft length, with the acceptance of this draft length
    target               the targets that it is for: dense ones, or those with experts; None: any
    beside               further draft lengths that are measured with it, but not judged
    level                micro: a few steps; full: a whole scenario, measured only when the micro gates are green
    needed               the number of green runs in a row that it needs
    min_speed_up         least tokens/s over those without speculation
    experts_bound_share  for targets with experts also the least share of the speed-up that the steps' bytes allow
    min_accept_length    least tokens a drafted step, bonus included: tested at a fixed draft length if acceptance is
                         not imposed; imposed if gates are to have their own acceptance
    min_drafted_share    least share of steps with drafts
    """

    name: str
    context: Context
    batch: Batch
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MAX_SPECULATIVE_TOKENS)]
    steps: Count
    min_speed_up: Positive
    min_accept_length: Positive
    experts_bound_share: Positive | None = None
    level: Level = "micro"
    needed: Annotated[int, Meta(ge=1, le=100)] = 3
    beside: tuple[Depth, ...] = ()
    warm_up: Count = 16
    repeats: Annotated[int, Meta(ge=1, le=100)] = 1
    policy: Policy = "fixed"
    target: Target | None = None
    min_drafted_share: Annotated[float, Meta(ge=0, le=1)] = 0.0

    @property
    def judged(self) -> Case:
        """The case that is compared with the one without drafts."""
        depth = self.num_speculative_tokens if self.policy == "fixed" else MAX_SPECULATIVE_TOKENS
        return Case(self.context, self.batch, depth, self.policy)

    def is_for(self, experts: bool) -> bool:
        """Whether it is for a target with or without experts."""
        return self.target in (None, "experts" if experts else "dense")

    def scenario(self) -> Scenario:
        """Return a scenario of the two rows that it compares, and those beside them."""
        own: int | Literal["auto"] = self.num_speculative_tokens if self.policy == "fixed" else "auto"
        return Scenario(
            contexts=(self.context,),
            batches=(self.batch,),
            num_speculative_tokens=tuple(dict.fromkeys((0, own, *self.beside))),
            steps=self.steps,
            warm_up=self.warm_up,
            repeats=self.repeats,
            reuse_prompts=True,
        )


class PlanFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The scenarios of a file by name, and its gates."""

    scenarios: dict[str, Scenario] = {}
    gates: tuple[Gate, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The shipped scenarios and gates, and those of a user's file, whose scenarios take precedence.

    gates    the gates that `lowlat bench gates` measures: the file's if it has any, else the shipped ones
    shipped  the shipped gates
    large    drafts at this context or a longer one require the shipped gates
    """

    scenarios: dict[str, Scenario]
    gates: tuple[Gate, ...]
    shipped: tuple[Gate, ...]
    large: int

    def gates_for(self, scenario: Scenario, experts: bool) -> list[Gate]:
        """Return the gates that a scenario requires for a target with or without experts.

        The shipped ones depend on what it measures; those of its file are required if it says so.
        """
        asked = [*self.gates] if scenario.gated else []
        if scenario.longest_drafted >= self.large:
            asked += self.shipped
        return [gate for gate in dict.fromkeys(asked) if gate.is_for(experts)]

    def gates_of(self, level: Level, experts: bool) -> list[Gate]:
        """Return the gates of one level for a target with or without experts."""
        return [gate for gate in self.gates if gate.level == level and gate.is_for(experts)]

    def scenario(self, name: str) -> Scenario:
        """Return a scenario. Raises ConfigError for an unknown name."""
        if name not in self.scenarios:
            raise ConfigError(f"no scenario {name!r:.80}; known: {', '.join(self.scenarios)}")
        return self.scenarios[name]


def read_plan(path: Path | None = None) -> Plan:
    """Read the shipped plan, with scenarios and gates of a user's file. Raises ConfigError with file and field."""
    shipped = _read(SHIPPED)
    own = PlanFile() if path is None else _read(path)
    large = min(min(scenario.contexts) for scenario in shipped.scenarios.values() if scenario.gated)
    return Plan({**shipped.scenarios, **own.scenarios}, own.gates or shipped.gates, shipped.gates, large)


def _read(path: Path) -> PlanFile:
    try:
        plan = msgspec.toml.decode(path.read_bytes(), type=PlanFile)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    names = [gate.name for gate in plan.gates]
    if len(set(names)) < len(names) or not all(_is_word(name) for name in (*plan.scenarios, *names)):
        raise ConfigError(f"{path}: scenarios and gates need names of letters, digits and dashes, each another")
    return plan


def _is_word(name: str) -> bool:
    return bool(name) and all(part.isalnum() and part.isascii() for part in name.split("-"))


def _size(size: tuple[int, int]) -> tuple[int, int]:
    context, batch = size
    return context * batch, context
