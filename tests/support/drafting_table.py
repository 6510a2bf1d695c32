"""Which ways of drafting are tried with what else: factors, what goes together, and cases that hold every pair.

A case gives each factor a value. Two values that no rule forbids stand together in some case; what a rule forbids is
refused by name. `covering` makes the cases, always the same.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product

Case = Mapping[str, str]

FACTORS: Mapping[str, tuple[str, ...]] = {
    # beside: drafts from text next to EAGLE3's, or to a whole model's
    "method": (
        *("eagle3", "peagle", "dflash", "dspark", "draft_model", "mtp", "ngram", "suffix"),
        *("beside", "whole_beside", "none"),
    ),
    "shape": ("chain", "static", "dynamic", "adaptive"),
    "partial": ("whole", "lossy", "lossless"),
    # wide steps that verify copies, with texts that requests name; or what a grammar forces; or longer blocks of drafts
    "rows": ("usual", "wide", "forced", "longer"),
    "weights": ("float32", "bfloat16", "fp8", "int4", "awq", "nvfp4", "mxfp4"),
    "drafts": ("plain", "fp8"),  # the draft model's weights
    "cache": ("plain", "fp8"),
    "ranks": ("1", "2"),
    "slots": ("few", "many"),  # more than eight
    "grammar": ("free", "bound"),
    "sampling": ("greedy", "logprobs", "penalised"),
    "prefix": ("cold", "reused", "saved"),  # saved: in a session's file
    "prompt": ("whole", "growing"),
    "device": ("steps", "queued", "loop"),
    "event": ("none", "cancel", "limit", "full", "pause"),
}
SIMPLEST: Case = {name: values[0] for name, values in FACTORS.items()}
MODELS = (
    "eagle3",
    "peagle",
    "dflash",
    "dspark",
    "draft_model",
    "beside",
    "whole_beside",
)  # methods that have a draft model of its own files
BESIDE = {"beside": "eagle3", "whole_beside": "draft_model"}  # whose drafts they are
TEXT = ("ngram", "suffix", "none")
TREES = ("static", "dynamic")
ADAPTIVE = ("adaptive",)


@dataclass(frozen=True)
class Rule:
    """Values that do not go together, and what the refusal says; None: the options cannot say it."""

    values: Mapping[str, tuple[str, ...]]
    message: str | None

    def forbids(self, case: Case) -> bool:
        """Whether a case, of some factors or of all, has all of it."""
        return all(case.get(name) in values for name, values in self.values.items())

    def examples(self) -> Iterator[Case]:
        """The cases that differ from the simplest by values of this rule alone."""
        for values in product(*self.values.values()):
            yield {**SIMPLEST, **dict(zip(self.values, values, strict=True))}


UNCOPIED = tuple(method for method in FACTORS["method"] if method not in ("suffix", *BESIDE))
UNBLOCKED = tuple(method for method in FACTORS["method"] if method != "dflash")

RULES = (
    Rule({"rows": ("wide",), "method": UNCOPIED[:-1]}, "wide_rows is an option of method 'suffix'"),
    Rule({"rows": ("wide",), "method": UNCOPIED[-1:]}, None),
    # with method "suffix", too, of whose options it is: see test_wide_steps.py
    Rule({"rows": ("wide",), "shape": FACTORS["shape"][1:]}, "wide_rows is an option of method 'suffix'"),
    Rule({"rows": ("wide",), "partial": ("lossy", "lossless")}, "wide_rows is an option of method 'suffix'"),
    Rule({"rows": ("longer",), "method": UNBLOCKED[:-1]}, "max_block_drafts is an option of method 'dflash'"),
    Rule({"rows": ("longer",), "method": UNBLOCKED[-1:]}, None),
    # with method "dflash", too, of whose options it is: see test_longer_drafts.py
    Rule({"rows": ("longer",), "shape": FACTORS["shape"][1:]}, "max_block_drafts is an option of method 'dflash'"),
    Rule({"rows": ("longer",), "partial": ("lossy", "lossless")}, "max_block_drafts is an option of method 'dflash'"),
    Rule({"rows": ("forced",), "shape": ADAPTIVE}, "forced_rows 16 is not implemented for adaptive_width"),
    Rule({"rows": ("forced",), "partial": ("lossy", "lossless")}, "forced_rows 16 is not implemented for enable_spec"),
    Rule({"method": ("none",), "shape": FACTORS["shape"][1:]}, None),
    Rule({"method": ("none",), "partial": ("lossy", "lossless")}, None),
    Rule({"method": ("none",), "drafts": ("fp8",)}, None),
    Rule({"method": ("ngram", "suffix"), "drafts": ("fp8",)}, "draft_quantize is an option of method"),
    Rule(
        {"method": ("ngram", "suffix", "draft_model", "whole_beside"), "shape": ("static",)},
        "tree is an option of method",
    ),
    Rule(
        {"method": ("ngram", "suffix", "dspark", "draft_model", "whole_beside"), "shape": ("dynamic",)},
        "dynamic_tree_max_topk is an option of",
    ),
    Rule({"method": ("beside",), "shape": TREES}, "text_drafts 'suffix' goes with a chain"),
    *(
        Rule(
            {"method": (name,), "shape": ADAPTIVE}, f"is not implemented for method '{model}' with text_drafts 'suffix'"
        )
        for name, model in BESIDE.items()
    ),
    Rule({"method": ("mtp",), "shape": TREES}, "trees of drafts are not implemented for targets with gated delta nets"),
    Rule({"method": ("mtp",), "partial": ("lossy", "lossless")}, "enable_specpv is not implemented for targets with"),
    Rule({"method": ("mtp",), "weights": ("mxfp4",)}, None),  # no hybrid has such experts
    Rule({"method": ("mtp",), "weights": ("awq", "nvfp4"), "drafts": ("fp8",)}, "is stored in .* is for plain weights"),
    Rule({"partial": ("lossy", "lossless"), "shape": ADAPTIVE}, "enable_specpv goes with a fixed number of drafts"),
    Rule({"partial": ("lossless",), "shape": TREES}, "specpv_lossless goes with chains"),
    Rule({"partial": ("lossy", "lossless"), "ranks": ("2",)}, "enable_specpv is not implemented for tensor_parallel"),
    Rule({"slots": ("many",), "shape": TREES}, "is not implemented for max_batch"),
    Rule({"slots": ("many",), "partial": ("lossy", "lossless")}, "enable_specpv is not implemented for max_batch"),
    Rule({"slots": ("many",), "ranks": ("2",)}, "max_batch .* is not implemented for tensor_parallel_size 2"),
    Rule({"partial": ("lossless",), "grammar": ("bound",)}, "draw under no grammar's masks"),
    Rule({"prompt": ("growing",), "grammar": ("bound",)}, None),  # the table's grammar comes with a whole prompt
)


def allowed(case: Case) -> bool:
    """Whether no rule forbids a case, of some factors or of all."""
    return not any(rule.forbids(case) for rule in RULES)


def pairs_of(case: Case) -> Iterator[tuple[tuple[str, str], ...]]:
    """The pairs of values in a case."""
    return combinations(sorted(case.items()), 2)


def every_pair() -> set[tuple[tuple[str, str], ...]]:
    """The pairs of values that go together."""
    found = set()
    for (one, values), (other, others) in combinations(sorted(FACTORS.items()), 2):
        for pair in product(values, others):
            case = dict(zip((one, other), pair, strict=True))
            if allowed(case):
                found.add(tuple(sorted(case.items())))
    return found


def covering() -> list[Case]:
    """Cases that hold every pair; those at the front hold most of what those before them lack.

    Each begins with the first pair that is lacking, and takes value by value what brings most that is.
    """
    items = [(name, value) for name, values in FACTORS.items() for value in values]
    rules = {item: [rule for rule in RULES if item[1] in rule.values.get(item[0], ())] for item in items}
    cases, used = list[Case](), Counter[tuple[str, str]]()
    lacking: dict[tuple[str, str], set[tuple[str, str]]] = {item: set() for item in items}
    for one, other in every_pair():
        lacking[one].add(other)
        lacking[other].add(one)
    while any(lacking.values()):
        case = dict(min(pair for item, others in lacking.items() for pair in ((item, each) for each in others)))
        while len(case) < len(FACTORS):
            fitting = [
                item
                for item in items
                if item[0] not in case and not any(rule.forbids({**case, item[0]: item[1]}) for rule in rules[item])
            ]
            best = max((len(lacking[item] & case.items()), -used[item], item) for item in fitting)[-1]
            case.update([best])
        cases.append({name: case[name] for name in FACTORS})
        for item in case.items():
            lacking[item] -= case.items()
        used.update(case.items())
    return cases


def named(case: Case) -> str:
    """A case in words: what differs from the simplest."""
    return "-".join(value for name, value in case.items() if value != SIMPLEST[name] or name == "method")
