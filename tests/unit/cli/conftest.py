"""The models that the commands run on, and the threads that they may take."""

from pathlib import Path

import pytest
from text_tokenizers import byte_level, write_directory
from tiny_models import PairPaths, make_pair, make_target

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}> {% endif %}"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    """A target without a tokenizer, and a head of which it accepts a good part."""
    return make_pair(tmp_path_factory.mktemp("pair"), "llama")


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("talker")
    make_target(directory, "llama", vocab_size=byte_level().get_vocab_size(), num_hidden_layers=2)
    return write_directory(directory, byte_level(), chat_template=TEMPLATE)
