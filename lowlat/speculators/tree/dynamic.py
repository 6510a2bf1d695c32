"""A dynamic tree has a fixed size; the device chooses its nodes in each step.

The candidates of a level are the K likeliest tokens after the root, or after each of the K best drafts of the level
before. After the last level the T - 1 best candidates of all levels are verified. The reference
`lowlat.kernels.reference.speculation.grow` defines the order.
Source: EAGLE-2, arXiv 2406.16858, section 4.
"""

from dataclasses import dataclass
from functools import cached_property

from lowlat.errors import ConfigError
from lowlat.kernels.reference.speculation.grow import first_entry
from lowlat.speculators.tree.topology import TreeTopology

__all__ = ["DEFAULT_DRAFT_TOKENS", "DynamicTree", "Topology"]

DEFAULT_DRAFT_TOKENS = 7
MAX_DRAFTED_ROWS = 64  # rows of the draft model after a slot's last token: a mask is one word


@dataclass(frozen=True)
class DynamicTree:
    """The shape of a dynamic tree of T nodes, S deep; node 0, the root, is the last committed token.

    depth      S
    top_k      K: candidates after one draft, and drafts of a level that are expanded
    num_nodes  T, root included: the rows that a slot verifies
    Raises ConfigError, naming the options, for a shape that cannot be.
    """

    depth: int
    top_k: int
    num_nodes: int

    def __post_init__(self) -> None:
        if self.depth < 2:
            raise ConfigError(f"a dynamic tree is at least 2 deep, got {self.depth} (max_draft_len)")
        if self.num_drafted_rows > MAX_DRAFTED_ROWS:
            raise ConfigError(
                f"dynamic_tree_max_topk {self.top_k} * (max_draft_len {self.depth} - 1) = {self.num_drafted_rows} is "
                f"above {MAX_DRAFTED_ROWS}, the rows that a draft model may run over"
            )
        drafts = self.num_nodes - 1
        if not self.depth <= drafts <= self.num_entries:
            raise ConfigError(
                f"max_total_draft_tokens must be from max_draft_len {self.depth} to the {self.num_entries} drafts that "
                f"dynamic_tree_max_topk {self.top_k} looks at, got {drafts}"
            )

    @property
    def is_chain(self) -> bool:
        """Never, whatever nodes a step chooses."""
        return False

    @property
    def limits(self) -> dict[str, int]:
        """The limits, by the names of options, within which any tree lies that a step may choose."""
        return {
            "num_speculative_tokens": self.depth,
            "max_path_len": self.depth + 1,
            "max_decoding_tokens": self.num_nodes,
            "max_non_leaves_per_layer": min(self.top_k, self.num_nodes - 1),
        }

    @cached_property
    def num_entries(self) -> int:
        """The drafts that are looked at."""
        return first_entry(self.depth + 1, self.top_k)

    @property
    def num_choices(self) -> int:
        """The likeliest tokens after one that drafting takes, at most."""
        return self.top_k

    @property
    def num_drafted_rows(self) -> int:
        """The rows of all levels but the root's that a draft model runs over."""
        return self.top_k * (self.depth - 1)

    @property
    def num_paths(self) -> int:
        """The most leaves that the tree can have: as few of its nodes as possible then have children."""
        drafts = self.num_nodes - 1
        return drafts - max(0, -(-drafts // self.top_k) - 1)

    @property
    def path_width(self) -> int:
        """Nodes of the longest path, root included."""
        return self.depth + 1


Topology = TreeTopology | DynamicTree
