"""The baseline: the same decode step made of torch's own operations, captured in one torch.cuda.CUDAGraph.

Products are cuBLAS, norms torch's own kernel, attention the fastest way of `bench.torch_attention` for the case.
Nothing of it touches the host. What it leaves out, to its own advantage: acceptance (every draft counts as accepted,
and lengths stay where they are), sampling, stops, commits and publication. It keeps the cache of a slot contiguous.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from bench.lib.case import Case
from bench.lib.clock import Timed, round_robin
from bench.lib.model import Model
from bench.torch_attention import WAYS, AttentionShape, Choice, choose, compile_fixed, padded
from lowlat.models.geometry import ModelConfig

__all__ = ["GLUES", "TorchStep", "rope_rows"]

EAGER, COMPILED = GLUES = ("eager", "compiled")  # one kernel an operation; small operations fused by torch.compile
TURN = 10


def rope_rows(theta: float, head_dim: int, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cosines, and sines with the sign of the half they are added to: [2, n, 1, D] for positions [n]."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.float()[:, None] / theta**exponents
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))[:, :, None].to(dtype)


class _Layers:
    """The row-wise and product parts of a layer; eager ones work in place, compiled ones leave fusion to torch."""

    def __init__(self, config: ModelConfig, glue: str) -> None:
        mixer = config.attention
        self.heads, self.kv_heads, self.head_dim = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
        self.eps, self.compiled = config.rms_norm_eps, glue == COMPILED
        parts: tuple[Callable[..., Any], ...] = (self._enter, self._leave, self._join)
        self.enter, self.leave, self.join = map(compile_fixed, parts) if self.compiled else parts

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def _join(
        self, embedded: torch.Tensor, hidden: torch.Tensor, embed_norm: torch.Tensor, hidden_norm: torch.Tensor
    ) -> torch.Tensor:
        """The head's attention input [M, 2H]."""
        return torch.cat((self.norm(embedded, embed_norm), self.norm(hidden, hidden_norm)), -1)

    def _enter(
        self, x: torch.Tensor, weight: torch.Tensor, turns: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Fused product of normed rows, RoPE, keys and values written to k, v [B, G, T, D]: queries [B, H, T, D]."""
        batch, _, rows, _ = k.shape
        product = F.linear(x, weight).view(batch * rows, -1, self.head_dim)
        turned = product[:, : self.heads + self.kv_heads]
        turned = torch.addcmul(turned * turns[0], turned.roll(self.head_dim // 2, -1), turns[1])
        parts = turned.view(batch, rows, -1, self.head_dim).transpose(1, 2)
        k.copy_(parts[:, self.heads :])
        v.copy_(product.view(batch, rows, -1, self.head_dim)[:, :, self.heads + self.kv_heads :].transpose(1, 2))
        return parts[:, : self.heads]

    def _add(self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """residual + x @ weight.T: through cuBLAS's own addition, in place, where torch fuses nothing."""
        return residual + F.linear(x, weight) if self.compiled else residual.addmm_(x, weight.t())

    def _leave(
        self,
        residual: torch.Tensor,
        attended: torch.Tensor,
        o: torch.Tensor,
        norm: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        next_norm: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output product, norm and FFN, with both residual sums, and the norm after them; eager: in place."""
        residual = self._add(residual, attended, o)
        gate, up = F.linear(self.norm(residual, norm), gate_up).chunk(2, -1)
        residual = self._add(residual, F.silu(gate) * up, down)
        return residual, self.norm(residual, next_norm)


class TorchStep:
    """One captured step of torch's operations.

    weights    canonical, row-major; used where they lie, but for the head's fused q, k and v
    attention  ways of `bench.torch_attention` to choose from; None: all
    On a CPU nothing is captured. The caches, of the layers and last of the head, are (k, v) of [B, G, Lc, D] each,
    filled with random numbers.
    """

    def __init__(
        self,
        model: Model,
        case: Case,
        weights: Mapping[str, torch.Tensor],
        device: torch.device,
        *,
        attention: Sequence[str] | None = None,
        seed: int = 1,
    ) -> None:
        self.name = "torch"
        self.num_launches = 0
        self.glue = EAGER
        self.glue_ms: dict[str, float | str] = {}
        self.case, self.weights, self.device = case, weights, device
        self.config, self.boundaries = model.config, model.geometry.drafter("eagle3").boundaries
        self.dtype = weights["embed.weight"].dtype
        generator = torch.Generator(device).manual_seed(seed)
        depth, first = case.num_speculative_tokens, case.context + case.rows
        self.capacity = padded(first + depth)
        self.caches = self._fill_caches(generator)
        shape = (case.batch, case.rows)
        self.tokens = torch.randint(
            self.config.vocab_size, shape, generator=generator, device=device, dtype=torch.int32
        )
        self.logits = torch.empty(0, device=device)  # of the last run, [B * T, V]
        self.draft_logits: list[torch.Tensor] = []  # of each draft step, [B, Vd]
        self._layers = _Layers(self.config, EAGER)
        positions, mixer = torch.arange(self.capacity, device=device), self.config.attention
        self._turns = rope_rows(mixer.rope.theta, mixer.head_dim, positions, self.dtype)
        spans = [(case.context, first), *((first + level, first + level + 1) for level in range(depth))]
        self._positions = [positions[begin:end].repeat(case.batch) for begin, end in spans]
        self._fused = torch.cat((weights["head.q.weight"], weights["head.kv.weight"])) if depth else None
        self._replay: Callable[[], None] = self.run
        self.attention = choose(self._shape(case.rows, first), self.caches[:-1], attention)
        self.head_attention: Choice | None = None
        self._head_attend: list[Callable[..., torch.Tensor]] = []
        if depth:
            shapes = [self._shape(1, first + level) for level in range(depth)]
            self.head_attention = choose(shapes[0], self.caches[:-1], attention)
            self._head_attend = [WAYS[self.head_attention.name](shape, device, self.dtype) for shape in shapes]

    def _fill_caches(self, generator: torch.Generator) -> list[tuple[torch.Tensor, torch.Tensor]]:
        g = self.config.attention
        shape = (self.case.batch, g.num_kv_heads, self.capacity, g.head_dim)

        def filled() -> torch.Tensor:
            return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(generator=generator)

        return [(filled(), filled()) for _ in range(self.config.num_layers + 1)]

    def _shape(self, rows: int, length: int) -> AttentionShape:
        g = self.config.attention
        return AttentionShape(self.case.batch, g.num_heads, g.num_kv_heads, g.head_dim, rows, length, self.capacity)

    def capture(self, glues: Sequence[str] = GLUES, replays: int = 20) -> None:
        """Capture the step into one graph for each way to run its small operations, and keep the fastest.

        Without CUDA there is nothing to capture, and the eager way stays.
        """
        if self.device.type != "cuda":
            return
        entries, graphs = [], {}
        for glue in glues:
            try:
                graphs[glue] = self._capture(glue)
                entries.append(Timed(glue, graphs[glue].replay))
            except Exception as error:  # no compiler there, say: the other way remains
                self.glue_ms[glue] = f"{type(error).__name__}: {str(error)[:120]}"
        if not entries:
            raise RuntimeError(f"the step of torch's operations was not captured: {self.glue_ms}")
        round_robin(entries, replays, TURN, self.device)
        self.glue_ms |= {entry.name: round(entry.median, 4) for entry in entries}
        self.glue = min(entries, key=lambda entry: entry.median).name
        self.num_launches = _count_nodes(graphs[self.glue])
        self._replay = graphs[self.glue].replay

    def _capture(self, glue: str) -> torch.cuda.CUDAGraph:
        self._layers = _Layers(self.config, glue)
        current, stream = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.run()
        current.wait_stream(stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph(keep_graph=True)  # kept next to its executable form, so that nodes can be counted
        with torch.cuda.graph(graph):
            self.run()
        graph.instantiate()
        return graph

    def replay(self) -> None:
        """Launch one step on torch's current stream."""
        self._replay()

    def described(self) -> dict[str, Any]:
        """The fields of a row that say how it was made."""
        head = self.head_attention
        return {
            "torch_attention": self.attention.name,
            "torch_attention_us": self.attention.microseconds,
            "torch_head_attention": None if head is None else head.name,
            "torch_head_attention_us": None if head is None else head.microseconds,
            "torch_glue": self.glue,
            "torch_glue_ms": self.glue_ms,
            "torch_launches": self.num_launches,
        }

    @torch.no_grad()
    def run(self) -> None:
        """The step, operation by operation: reads `tokens` and leaves the next step's there."""
        captured, final = self._target()
        self.logits = F.linear(final, self.weights["lm_head.weight"])
        chosen = self.logits.argmax(-1).to(torch.int32).view_as(self.tokens)
        if self.case.num_speculative_tokens:
            self.tokens[:, 1:].copy_(self._draft(torch.cat(captured, -1), chosen))
        self.tokens[:, 0].copy_(chosen[:, -1])

    def _target(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Captured residual streams and the normed last one, each [M, H]."""
        g, weights, context, rows = self.config, self.weights, self.case.context, self.case.rows
        turns, own = self._turns[:, self._positions[0]], slice(context, context + rows)
        norms = [weights[f"layers.{layer}.attn_norm.weight"] for layer in range(g.num_layers)]
        residual = F.embedding(self.tokens.view(-1), weights["embed.weight"])
        normed = self._layers.norm(residual, norms[0])
        captured: list[torch.Tensor] = []
        for layer, next_norm in enumerate([*norms[1:], weights["norm.weight"]]):
            self._keep(captured, layer, residual)
            name, (k, v) = f"layers.{layer}", self.caches[layer]
            q = self._layers.enter(normed, weights[f"{name}.qkv.weight"], turns, k[:, :, own], v[:, :, own])
            residual, normed = self._leave(name, residual, self.attention.attend(q, k, v), next_norm)
        self._keep(captured, g.num_layers, residual)
        return captured, normed

    def _keep(self, captured: list[torch.Tensor], boundary: int, residual: torch.Tensor) -> None:
        """Add a residual stream that the head needs; it may be changed in place afterwards."""
        if self.case.num_speculative_tokens and boundary in self.boundaries:
            captured.append(residual.clone())

    def _leave(
        self, name: str, residual: torch.Tensor, attended: torch.Tensor, next_norm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights = (self.weights[f"{name}.{part}.weight"] for part in ("o", "ffn_norm", "gate_up", "down"))
        left: tuple[torch.Tensor, torch.Tensor] = self._layers.leave(residual, attended, *weights, next_norm)
        return left

    def _draft(self, features: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """S drafts a slot [B, S] int32: the head over the T rows, then over one row after another."""
        case, rows = self.case, self.case.rows
        hidden = F.linear(features, self.weights["head.fc.weight"])
        tokens, feedback = self._head_level(0, chosen.view(-1), hidden, rows)
        drafts = [tokens]
        for depth in range(1, case.num_speculative_tokens):
            tokens, feedback = self._head_level(depth, tokens, feedback, 1)
            drafts.append(tokens)
        return torch.stack(drafts, 1)

    def _head_level(
        self, depth: int, tokens: torch.Tensor, hidden: torch.Tensor, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [B * rows] and states [B * rows, H] to the next token [B] and the state fed back [B, H]."""
        weights, batch = self.weights, self.case.batch
        if self._fused is None:
            raise ValueError("S = 0 has no head")
        start = 0 if depth == 0 else self.case.rows + depth - 1
        turns = self._turns[:, self._positions[depth]]
        norms = weights["head.embed_norm.weight"], weights["head.hidden_norm.weight"]
        both = self._layers.join(F.embedding(tokens, weights["embed.weight"]), hidden, *norms)
        (k, v), own = self.caches[-1], slice(self.case.context + start, self.case.context + start + rows)
        q = self._layers.enter(both, self._fused, turns, k[:, :, own], v[:, :, own])[:, :, -1:]
        last = hidden.view(batch, rows, -1)[:, -1].contiguous()
        attended = self._head_attend[depth](q, k, v)
        residual, final = self._leave("head", last, attended, weights["head.norm.weight"])
        logits = F.linear(final, weights["head.lm_head.weight"])
        self.draft_logits = [*self.draft_logits[:depth], logits]
        return weights["head.draft_to_target"][logits.argmax(-1)], residual


def _count_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Nodes of a captured graph; 0 where the bindings cannot tell."""
    try:
        from cuda.bindings import runtime

        status, _, count = runtime.cudaGraphGetNodes(graph.raw_cuda_graph())
        if int(status):
            return 0
        return int(count)
    except (ImportError, AttributeError, TypeError, RuntimeError, ValueError):
        return 0
