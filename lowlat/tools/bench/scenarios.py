"""Scenarios and gates are measurements that TOML declares; this module reads them, and makes their cases."""

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
        """S as `-S` takes it."""
        return str(self.num_speculative_tokens) if self.policy == "fixed" else self.policy

    @property
    def name(self) -> str:
        """For instance `1 x 8K, S=3`."""
        context = f"{self.context // 1024}K" if self.context % 1024 == 0 else str(self.context)
        return f"{self.batch} x {context}, S={self.depth}"


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cases and sizes that one result file measures; an S of auto is a width that each step chooses.

    steps          timed steps of a repeat; of churn the tokens of the longest request
    warm_up        steps before them
    traffic        steady: all requests decode side by side; churn: they come, go and are cancelled
    reuse_prompts  share keys and values of prompts between repeats and cases; each is read before any request
                   decodes, and is timed where nothing of it was read before, as in the largest case
    kv_share       of the blocks of keys and values that a runtime has, those that its requests take
    alike          a repeat that brings other tokens than the first is an error; of steady traffic
    gated          asks for the gates of its own file; one with drafts at a context of the shipped plan's gated
                   scenarios asks for the shipped gates, whatever its name and whatever this says
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
        """All rows: those of one depth together, the largest first."""
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
        """The longest context that it drafts at; 0 where it does not draft."""
        return max(self.contexts) if self.drafts else 0

    def measuring(self) -> "Scenario":
        """How rows are measured, whichever they are: equal for scenarios whose rows can stand in one file."""
        return msgspec.structs.replace(self, contexts=(), batches=(), num_speculative_tokens=(), help="")


class Gate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measurement that large scenarios ask for first: a draft length next to none.

    num_speculative_tokens  the draft length that is judged
    policy               auto: steps that choose their draft length are judged; acceptance is that of the draft length
    target               the targets that it is for: dense ones, or those with experts; None: any
    beside               further draft lengths that are measured with it, and are no part of the verdict
    level                micro: a few steps; full: a whole scenario, measured only when the micro gates are green
    needed               green so many times in a row
    min_speed_up         tokens/s over those without speculation, at least
    experts_bound_share  and of a target with experts at least so much of what the bytes of both steps allow
    min_accept_length    tokens a drafted step, bonus included, at least: tested at a fixed draft length where it is
                         not imposed; what is imposed where gates are to have an acceptance of their own
    min_drafted_share    of steps, those with drafts at least
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
        """The case that is held against the one without drafts."""
        depth = self.num_speculative_tokens if self.policy == "fixed" else MAX_SPECULATIVE_TOKENS
        return Case(self.context, self.batch, depth, self.policy)

    def is_for(self, experts: bool) -> bool:
        """Whether it is for a target that has experts, or has none."""
        return self.target in (None, "experts" if experts else "dense")

    def scenario(self) -> Scenario:
        """The two rows that it compares, and those next to them."""
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
    """A file's scenarios by name, and its gates."""

    scenarios: dict[str, Scenario] = {}
    gates: tuple[Gate, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The shipped scenarios and gates, and those of a file of one's own, whose scenarios go before.

    gates    the file's own where it has any, else the shipped ones: those that `lowlat bench gates` measures
    shipped  the shipped gates
    large    drafts at this context or a longer one ask for the shipped gates
    """

    scenarios: dict[str, Scenario]
    gates: tuple[Gate, ...]
    shipped: tuple[Gate, ...]
    large: int

    def gates_for(self, scenario: Scenario, experts: bool) -> list[Gate]:
        """The gates that a scenario asks for of a target with or without experts: the shipped ones by what it measures,
        its file's where it says so."""
        asked = [*self.gates] if scenario.gated else []
        if scenario.longest_drafted >= self.large:
            asked += self.shipped
        return [gate for gate in dict.fromkeys(asked) if gate.is_for(experts)]

    def gates_of(self, level: Level, experts: bool) -> list[Gate]:
        """The gates of one level for a target with or without experts."""
        return [gate for gate in self.gates if gate.level == level and gate.is_for(experts)]

    def scenario(self, name: str) -> Scenario:
        """One scenario. Raises ConfigError for an unknown name."""
        if name not in self.scenarios:
            raise ConfigError(f"no scenario {name!r:.80}; known: {', '.join(self.scenarios)}")
        return self.scenarios[name]


def read_plan(path: Path | None = None) -> Plan:
    """The shipped plan, with scenarios and gates of a file of one's own. Raises ConfigError naming file and field."""
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
