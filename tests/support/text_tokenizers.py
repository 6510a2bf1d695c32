"""Small tokenizers of each decodable kind, built or trained where a test needs them."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from lowlat.text import TextCodec

CORPUS = [
    "the quick brown fox jumps over the lazy dog. the dog's not amused!",
    "naïve café, déjà vu: 日本語の文章を少し。你好世界 你好。",
    "emoji 😀😀 👩‍👩‍👧 and e\u0301 combining; tabs\tand\nnew lines\n\n",
]
SPECIAL = ["<s>", "</s>"]


@cache
def byte_level() -> Tokenizer:
    """Like GPT-2: bytes, merged a little, so that characters are often split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["日本", "é x", "é"])  # outside the byte alphabet, partly outside, wholly inside
    return tokenizer


def _sentencepiece_vocabulary() -> dict[str, int]:
    pieces = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "a", "b", "c", "ab", "▁a", "▁b", "日", "本", "é", "a▁b", "<0x", "<0xZZ>", "."]
    return {piece: index for index, piece in enumerate(pieces)}


@cache
def sentencepiece(strip: bool = True) -> Tokenizer:
    """Like Llama 2 (strip) or Gemma: spaces as U+2581, unknown characters as runs of byte tokens."""
    model = models.BPE(
        vocab=_sentencepiece_vocabulary(),
        merges=[("a", "b"), ("▁", "a"), ("▁", "b"), ("▁", "▁")],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")] if strip else [normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """Like T5: U+2581 turns into a space, but not in the first token."""
    tokenizer = Tokenizer(models.BPE(vocab=_sentencepiece_vocabulary(), merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


@cache
def word_piece() -> Tokenizer:
    """Like BERT: words get a space before them, but not the first, nor ## pieces nor punctuation."""
    words = ["[UNK]", *SPECIAL, "a", "##a", "b", "dog", "##s", ".", "n't", "'", "日"]
    tokenizer = Tokenizer(models.WordPiece(vocab={word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


@cache
def words() -> Tokenizer:
    """No decoder at all: tokens are joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel(vocab={"a": 0, "dog": 1, "": 2, "日": 3, "</s>": 4}, unk_token="a"))
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "gemma": lambda: sentencepiece(strip=False),
    "metaspace": metaspace,
    "word_piece": word_piece,
    "words": words,
}


@cache
def codec(kind: str) -> TextCodec:
    """One codec of each kind; tests do not change it."""
    return TextCodec(KINDS[kind]())


def write_directory(path: Path, tokenizer: Tokenizer, **config: object) -> Path:
    """Write a model directory's text files."""
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path
