"""A small byte-level BPE tokenizer: digits one by one, then bytes, with `<|endoftext|>` as id 0.

    python -m bench.training.tokenizer --text FILE --out DIR [--vocabulary 4096]

Writes tokenizer.json and tokenizer_config.json as Hugging Face reads them.
"""

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.training.corpus import END_OF_TEXT, read_documents, split

__all__ = ["save_tokenizer", "train_tokenizer"]


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a BPE of `vocabulary` ids on texts; every byte is in it, so nothing is ever unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: str | Path, *, max_context: int) -> None:
    """Write tokenizer.json (compact) and tokenizer_config.json into a directory."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_context,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a byte-level BPE tokenizer on a text.")
    parser.add_argument("--text", required=True, help="documents separated by <|endoftext|> lines; .xz is read too")
    parser.add_argument("--out", required=True, help="directory to write into")
    parser.add_argument("--vocabulary", type=int, default=4096, help="number of ids")
    parser.add_argument("--max-context", type=int, default=2048, help="written as model_max_length")
    parser.add_argument("--sample-mb", type=float, default=60.0, help="megabytes of text to look at")
    arguments = parser.parse_args()
    training, held_out = split(read_documents(arguments.text))
    random.Random(0).shuffle(training)
    sample: list[str] = []
    size = 0.0
    for document in training:
        sample.append(document)
        size += len(document) / 1e6
        if size >= arguments.sample_mb:
            break
    tokenizer = train_tokenizer(sample, arguments.vocabulary)
    save_tokenizer(tokenizer, arguments.out, max_context=arguments.max_context)
    probe = "".join(held_out)[:1_000_000]
    tokens = len(tokenizer.encode(probe).ids) if probe else 0
    ratio = len(probe.encode()) / max(1, tokens)
    print(f"{tokenizer.get_vocab_size()} ids; {ratio:.2f} bytes a token on held-out text")


if __name__ == "__main__":
    main()
