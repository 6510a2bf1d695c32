"""This module cuts the draft vocabulary to the tokens that occur in a file, or to the most frequent of them.

The LM head of drafts keeps these tokens' rows, which are gathered at load. Other tokens are never drafted. Drafting is
faster, acceptance may be lower, and the output stays the target's.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lowlat.errors import ConfigError
from lowlat.kernels.formats import dequantised
from lowlat.models.geometry import DraftConfig, ModelConfig
from lowlat.models.layers import TORCH_DTYPES
from lowlat.models.target import OpenedTarget
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.base import LoadedSpeculator, Speculator
from lowlat.speculators.draft_parts import DRAFT_MAP, LM_HEAD
from lowlat.text.codec import TextCodec
from lowlat.text.counts import TokenCounts, count_text, count_token_ids, most_frequent

__all__ = ["DraftVocabulary", "cut_loaded", "cut_speculator", "read_vocabulary"]


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens that can be drafted.

    ids       target ids, ascending, [Vd] int64
    coverage  their share of the file's held-out tokens; None: no tokens were held out
    source    the file
    """

    ids: torch.Tensor
    coverage: float | None
    source: Path


def read_vocabulary(options: SpeculativeConfig, target: ModelConfig, directory: Path | None) -> DraftVocabulary | None:
    """The draft vocabulary that the options ask for; None: they ask for none.

    directory  the target's, whose tokenizer counts texts. The target's end tokens are always drafted.
    Raises ConfigError for a file that cannot be read or has other ids than the target's, and for a text without a
    tokenizer.
    """
    if options.draft_vocab is None:
        return None
    path = Path(options.draft_vocab)
    counts = _counted(path, target.vocab_size, directory)
    keep = sorted(target.eos_token_ids)
    seen = set(counts.chosen_by.nonzero().reshape(-1).tolist()) | set(counts.held_out.nonzero().reshape(-1).tolist())
    size = len(seen | set(keep)) if options.draft_vocab_size is None else options.draft_vocab_size
    if not len(keep) <= size <= target.vocab_size:
        raise ConfigError(
            f"draft_vocab_size must be from {max(1, len(keep))}, the target's end tokens, to {target.vocab_size}, its "
            f"vocabulary, got {size}"
        )
    if options.draft_vocab_size is None:  # all tokens of the file are drafted, held-out ones, too
        return DraftVocabulary(torch.tensor(sorted(seen | set(keep))), None, path)
    ids = most_frequent(counts.chosen_by, size, keep)
    return DraftVocabulary(ids, counts.coverage(ids), path)


def _counted(path: Path, vocab_size: int, directory: Path | None) -> TokenCounts:
    if path.suffix == ".json":
        return count_token_ids(path, vocab_size)
    codec = None if directory is None else TextCodec.load(directory)
    if codec is None:
        raise ConfigError(
            f"draft_vocab {path} is a text, and the target has no tokenizer.json to count its tokens by; give token "
            "ids, a .json file"
        )
    try:
        return count_text(path, codec, vocab_size)
    finally:
        codec.close()


def cut_speculator(speculator: Speculator, vocabulary: DraftVocabulary | None) -> Speculator:
    """The speculator with a draft vocabulary; None: its own. Raises ConfigError if it has a smaller one already."""
    config = speculator.draft_config
    if vocabulary is None or config is None:
        return speculator
    if config.draft_vocab_size != config.vocab_size:
        raise ConfigError(
            f"draft_vocab is for drafts of the whole vocabulary, and this draft model has {config.draft_vocab_size} "
            "tokens of its own choice (d2t); `lowlat draft-model shrink` makes one that has fewer"
        )
    if config.hidden_size != config.target_hidden_size and not config.own_lm_head:
        raise ConfigError(f"draft_vocab cuts an LM head of {config.hidden_size} inputs, and the target's has others")
    cut = replace(
        config,
        draft_vocab_size=len(vocabulary.ids),
        own_lm_head=True,
        own_draft_map=True,
        is_cut=True,
        coverage=vocabulary.coverage,
    )
    return speculator.with_config(cut)


def cut_loaded(
    found: LoadedSpeculator, vocabulary: DraftVocabulary | None, target: ModelConfig, source: OpenedTarget | None
) -> LoadedSpeculator:
    """The loaded speculator with a draft vocabulary: gathers rows of its own LM head, or of the target's.

    source  the target, whose LM head may be read; the rows are kept in the compute dtype, whatever their format was
    """
    whole = found.speculator.draft_config
    if vocabulary is None or whole is None:
        return found
    speculator, weights, dtype = cut_speculator(found.speculator, vocabulary), dict(found.weights), target.dtype
    if whole.own_lm_head:
        lm_head = dequantised(LM_HEAD, weights)
        for name in _parts_of_head(weights):
            del weights[name]
    elif source is not None:
        lm_head = dequantised(LM_HEAD.removeprefix("draft_model."), source.weights)
    else:
        raise ValueError("rows of the target's LM head are gathered, and its weights are not at hand")
    weights[LM_HEAD] = lm_head[vocabulary.ids].to(TORCH_DTYPES[dtype]).contiguous()
    weights[DRAFT_MAP] = vocabulary.ids.to(torch.int32)
    return replace(found, speculator=speculator, weights=weights, notes=(*found.notes, _note(vocabulary, whole)))


def _parts_of_head(names: Collection[str]) -> list[str]:
    owner = LM_HEAD.rpartition(".")[0]
    return [name for name in names if name.rpartition(".")[0] == owner]


def _note(vocabulary: DraftVocabulary, whole: DraftConfig) -> str:
    covered = ""
    if vocabulary.coverage is not None:
        covered = f", which are {vocabulary.coverage:.1%} of its tokens that were held out"
    return f"{len(vocabulary.ids)} of {whole.vocab_size} tokens are drafted, by {vocabulary.source}{covered}"
