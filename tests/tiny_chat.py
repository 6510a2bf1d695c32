"""A small random chat model: a byte tokenizer and a template that names tools, calls and their results as Hermes' does."""

from pathlib import Path

from text_tokenizers import byte_level, write_directory
from tiny_models import make_target

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


def make_chat_model(directory: Path, max_context: int = 4096) -> Path:
    """Write the model: two layers, hidden 32, text that means nothing."""
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    options = {"num_hidden_layers": 2, "max_position_embeddings": max_context, "eos_token_id": 1}
    make_target(directory, "llama", vocab_size=size, **options)
    return write_directory(directory, tokenizer, eos_token="</s>", chat_template=TEMPLATE)
