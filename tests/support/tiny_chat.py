"""This module makes a small random chat model: a byte-level tokenizer, and a template for tools like Hermes'."""

from collections.abc import Iterable
from pathlib import Path

from text_tokenizers import write_directory
from tiny_models import make_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["make_chat_model"]

TEMPLATE = """\
{%- if tools %}<|im_start|>system
Call a function as <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>. <tools>
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}</tools><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_chat_model(directory: Path, corpus: Iterable[str] = (), max_context: int = 4096) -> Path:
    """Write the model: two layers, hidden size 32; its text is meaningless.

    corpus  texts that train the tokenizer, with at most 1024 ids, so that similar prompts have few tokens
    """
    tokenizer = _byte_level([*corpus, TEMPLATE])
    size = tokenizer.get_vocab_size()
    options = {"num_hidden_layers": 2, "max_position_embeddings": max_context, "eos_token_id": 1}
    make_target(directory, "llama", vocab_size=size, **options)
    return write_directory(directory, tokenizer, eos_token="</s>", chat_template=TEMPLATE)


def _byte_level(corpus: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer
