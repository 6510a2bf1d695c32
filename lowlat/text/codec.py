"""A text codec encodes and decodes text with one model's tokenizer and chat template, loaded from its directory."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lowlat.checkpoint.files import find_bytes, find_text
from lowlat.errors import ConfigError, RequestError, not_unicode
from lowlat.text.faults import library_failures
from lowlat.text.growing import Cuts
from lowlat.text.lengths import LengthBound
from lowlat.text.literal import LiteralTokenizer
from lowlat.text.streams import Streams, TokenStream
from lowlat.text.templates.chat import ChatTemplates
from lowlat.text.templates.continued import ContinuedMessage, check_ending
from lowlat.text.templates.generic_tools import generic_messages, has_calls, with_short_ids
from lowlat.text.templates.probes import TemplateProbes
from lowlat.text.templates.tags import CALLS

__all__ = ["TextCodec"]

MAX_TOKENIZER_BYTES = 256 << 20  # the largest in the field are near 35 MB
MAX_CONFIG_BYTES = 16 << 20
MAX_TEMPLATE_BYTES = 256 << 10  # the largest in the field are near 30 kB
ADDITIONAL_TEMPLATES = "additional_chat_templates"  # transformers' name of the folder
MAX_TEMPLATES = 64
MAX_TEXT_CHARACTERS = 16 << 20
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TESTS_OF_NONE = tuple(f"content{end} is {word}" for end in ("", "']", '"]') for word in ("none", "not none"))


class TextCodec:
    """Encodes and decodes one model's text. Calls are safe from several threads.

    fingerprint     SHA-256 of tokenizer.json, hexadecimal: equal fingerprints mean equal token ids
    special_tokens  "bos_token", "eos_token", ... -> their text, as the model's files name them
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        fingerprint: str = "",
        special_tokens: Mapping[str, str] | None = None,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        templates: Mapping[str, str] | ChatTemplates | None = None,
    ) -> None:
        tokenizer.no_truncation()  # a file may ask for it, and prompts would silently lose their end
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._streams = Streams(tokenizer)
        self._literal = LiteralTokenizer(tokenizer)
        self._lengths = LengthBound(tokenizer)
        self._cuts: Cuts | None = None
        self.fingerprint = fingerprint
        self.special_tokens = dict(special_tokens or {})
        self._add_bos = self._edge("bos_token", add_bos)
        self._add_eos = self._edge("eos_token", add_eos)
        if templates is not None and not isinstance(templates, ChatTemplates):
            templates = ChatTemplates(templates) if templates else None
        self._chat = templates
        self._probes = None if self._chat is None else TemplateProbes(self._chat, self.special_tokens)

    @classmethod
    def load(cls, directory: str | Path) -> "TextCodec | None":
        """Load tokenizer.json and the files that belong to it; returns None without that file.

        The others are tokenizer_config.json (special tokens, add_bos_token, add_eos_token, chat_template),
        special_tokens_map.json, chat_template.jinja (takes precedence over tokenizer_config.json's templates), and
        additional_chat_templates/NAME.jinja.
        Raises ConfigError, which names the file, if one is damaged, too large or unsuitable.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        data = find_bytes(path, MAX_TOKENIZER_BYTES)
        if data is None:
            return None
        config_path = directory / "tokenizer_config.json"
        config = _find_object(config_path)
        named = _find_object(directory / "special_tokens_map.json")
        templates = _templates(directory, config)
        with _naming(path):
            tokenizer = _build(data)
        with _naming(_template_file(directory)):
            chat = ChatTemplates(templates) if templates else None
        with _naming(path):
            return cls(
                tokenizer,
                fingerprint=hashlib.sha256(data).hexdigest(),
                special_tokens=_special_tokens({**named, **config}),
                add_bos=_flag(config_path, config, "add_bos_token"),
                add_eos=_flag(config_path, config, "add_eos_token"),
                templates=chat,
            )

    @property
    def cuts(self) -> Cuts:
        """Finds where growing texts may be cut; made at its first use."""
        if self._cuts is None:
            self._cuts = Cuts(self._tokenizer)
        return self._cuts

    def _edge(self, name: str, wanted: bool | None) -> tuple[bool, int] | None:
        """Return whether a prompt must or must not begin, or end, with a token, and its id; None: as encoded."""
        text = self.special_tokens.get(name)
        token = None if text is None else self._tokenizer.token_to_id(text)
        if wanted and token is None:
            raise ConfigError(f"add_{name} is true, but {name} {text!r} is not in the vocabulary")
        return None if wanted is None or token is None else (wanted, token)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included; a model's vocabulary may be padded beyond it."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def ordinary_tokens(self) -> dict[str, int]:
        """The ids of tokens by the tokenizer's spelling, without added ones."""
        added = self._tokenizer.get_added_tokens_decoder()
        tokens = self._tokenizer.get_vocab(with_added_tokens=False)
        return {token: place for token, place in tokens.items() if place not in added}

    @property
    def eos_token_id(self) -> int | None:
        """The id of the end token that the tokenizer's files name; it may differ from the config's."""
        text = self.special_tokens.get("eos_token")
        return None if text is None else self._tokenizer.token_to_id(text)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return self._chat is not None

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template for tools renders them; for others lowlat writes them into the prompt."""
        names = () if self._chat is None else self._chat.names
        name = "tool_use" if "tool_use" in names else "default"
        return self._probes is not None and name in names and self._probes.takes_tools(name)

    @cached_property
    def tokens_beside(self) -> Mapping[int, str]:
        """Ids of all added tokens, special or not, and their text."""
        return {number: token.content for number, token in self._tokenizer.get_added_tokens_decoder().items()}

    def added_tokens(self) -> dict[int, str]:
        """Ids of the special tokens, and their text."""
        decoder = self._tokenizer.get_added_tokens_decoder()
        return {number: token.content for number, token in decoder.items() if token.special}

    def template_tokens(self) -> tuple[int, ...]:
        """Ids of the special tokens that the chat templates spell, ascending; none without templates."""
        sources = () if self._chat is None else self._chat.sources
        named = {self.special_tokens[name] for name in self.special_tokens if any(name in text for text in sources)}
        return tuple(
            number
            for number, text in sorted(self.added_tokens().items())
            if text in named or any(text in source for source in sources)
        )

    def spells(self, text: str) -> bool:
        """Whether the vocabulary has the text as a token, or a chat template contains it."""
        return self._tokenizer.token_to_id(text) is not None or self.template_has(text)

    def has_token(self, text: str) -> bool:
        """Whether the vocabulary has the text as a token."""
        return self._tokenizer.token_to_id(text) is not None

    def template_has(self, text: str) -> bool:
        """Whether a chat template's source contains this text."""
        return self._chat is not None and any(text in source for source in self._chat.sources)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token within a text, which may be those of an incomplete character."""
        return self._streams.bytes_within(token_id)

    def token_id(self, token: str) -> int | None:
        """Return a token's id, None when the vocabulary has no such token."""
        return self._tokenizer.token_to_id(token)

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        allow_special: bool = False,
        max_context: int | None = None,
        max_tokens: int = 1,
    ) -> list[int]:
        """Return a text's token ids.

        add_special_tokens  whether to put tokenizer.json's special tokens around the text, corrected by add_bos_token
                            and add_eos_token
        allow_special       whether special tokens that the text spells become those tokens; else they stay text
        max_context         the limit of the text's tokens and max_tokens together; a text whose length alone shows that
                            it exceeds the limit is refused before it is tokenized
        Raises RequestError for other types, invalid Unicode, more than 16 Mi characters, or too many tokens.
        """
        self._check_text(text, max_context, max_tokens)
        if not allow_special:
            self._literal.check(text)
        ids = self._ids(text, add_special_tokens, allow_special, max_context, max_tokens)
        if not add_special_tokens or (self._add_bos is None and self._add_eos is None):
            return ids
        return self._with_edges(ids, lambda: self._ids(text, False, allow_special, None, 0))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        allow_special: bool = False,
        max_context: int | None = None,
        max_tokens: int = 1,
        **variables: Any,
    ) -> list[int]:
        """Return the token ids of messages as the model's chat template renders them.

        messages, variables      as in `apply_chat_template`
        allow_special            whether special tokens that messages and variables spell become those tokens. Else they
                                 stay text, and only special tokens that the template itself writes whole are tokens
        max_context, max_tokens  as in `encode`
        Raises what `apply_chat_template` and `encode` raise.
        """
        limits: dict[str, Any] = {"allow_special": allow_special, "max_context": max_context, "max_tokens": max_tokens}
        return self.chat_ids(self.chat_text(messages, **limits, **variables), **limits)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        allow_special: bool = False,
        max_context: int | None = None,
        max_tokens: int = 1,
        **variables: Any,
    ) -> str:
        """Render messages for `chat_ids`, so that it distinguishes the template's special tokens from messages' text.

        Arguments and errors are those of `encode_chat`.
        """
        if allow_special:
            text = with_placeholders = self.apply_chat_template(messages, **variables)
        else:
            values, mark = self._literal.marked({"messages": _checked_messages(messages), **variables})
            text, with_placeholders = self._literal.template_tokens(self.apply_chat_template(**values), mark)
            if mark:
                self._literal.check(text)
        self._check_text(text, max_context, max_tokens)
        return with_placeholders

    def chat_ids(
        self, text: str, *, allow_special: bool = False, max_context: int | None = None, max_tokens: int = 1
    ) -> list[int]:
        """Return the token ids of a chat's text, or of a part of it, from `chat_text`."""
        return self._ids(text, False, allow_special, max_context, max_tokens)

    def check_length(self, text: str, max_context: int, max_tokens: int) -> None:
        """Raise RequestError for a text whose length alone shows that it exceeds a context, as `encode` does."""
        self._check_text(text, max_context, max_tokens)

    def _with_edges(self, ids: list[int], bare: Callable[[], list[int]]) -> list[int]:
        """Correct the special tokens that tokenizer.json puts around a text; `bare` encodes the text without them."""
        if self._add_bos is not None:
            wanted, token = self._add_bos
            found = ids[:1] == [token]
            if wanted and not found:
                ids = [token, *ids]
            elif found and not wanted:
                inner = bare()
                if ids[1 : 1 + len(inner)] == inner:  # the text itself does not begin with that token
                    ids = ids[1:]
        if self._add_eos is not None:
            wanted, token = self._add_eos
            found = ids[-1:] == [token]
            if wanted and not found:
                ids = [*ids, token]
            elif found and not wanted:
                inner = bare()
                if ids[len(ids) - 1 - len(inner) : -1] == inner:
                    ids = ids[:-1]
        return ids

    def _check_text(self, text: str, max_context: int | None, max_tokens: int) -> None:
        if not isinstance(text, str):
            raise RequestError(f"text must be a string, got {type(text).__name__}")
        if len(text) > MAX_TEXT_CHARACTERS:
            raise RequestError(f"text has {len(text)} characters; at most {MAX_TEXT_CHARACTERS}")
        try:
            num_bytes = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise not_unicode(error) from error
        least = self._lengths.least_tokens(text, num_bytes)
        if max_context is not None and least + max_tokens > max_context:
            tokens = f", at least {least} tokens," if least else ""
            raise _too_long(f"text of {num_bytes} bytes{tokens}", max_context, max_tokens)

    def _ids(
        self, text: str, add_special_tokens: bool, allow_special: bool, max_context: int | None, max_tokens: int
    ) -> list[int]:
        with library_failures("encode this text"):
            if allow_special:
                # not `encode`, which keeps the GIL: other threads would wait 50 ms for 100,000 characters
                (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            else:
                encoding = self._literal.encode(text, add_special_tokens=add_special_tokens)
        if max_context is not None and len(encoding) + max_tokens > max_context:
            # checked before the ids become Python numbers, which holds the GIL
            raise _too_long(f"prompt of {len(encoding)} tokens", max_context, max_tokens)
        return encoding.ids if allow_special else self._literal.ids(encoding)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; ids outside the vocabulary have none.

        Spaces are not cleaned up: `clean_up_tokenization_spaces` would change the model's text. Raises RequestError for
        anything that is no id.
        """
        with library_failures("decode these ids"):
            try:
                ids = list(ids)
                if bool in set(map(type, ids)):
                    raise TypeError("a bool is no token id")
                return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
            except (OverflowError, TypeError) as error:
                raise RequestError(f"token ids must be integers from 0 to {(1 << 32) - 1}") from error

    def open_stream(self, *, skip_special_tokens: bool = True) -> TokenStream:
        """Start decoding one request's ids as they come; `IncrementalDetokenizer` uses it."""
        return self._streams.open(skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Render messages by the model's chat template; `encode_chat` returns their token ids.

        messages   mappings such as {"role": "user", "content": "..."}; JSON values only. A field that is None is left
                   out. An assistant's message may lack its content: it is absent for the template, or "" if the
                   template needs it. If the template takes no tools, lowlat writes them and their calls and results
                   as text (`generic_tools`)
        variables  further variables of the template (tools, documents, enable_thinking, ...), and `chat_template`: the
                   name of one of several templates, by default "tool_use" if there are tools, else "default"
        continue_final_message  whether the last message, an assistant's, is left open: the answer continues its text
        add_generation_prompt   whether the beginning of an answer follows the messages; None: it does, unless the last
                                message is continued
        The template runs in a separate process, with limits. Raises RequestError without a template, or when it refuses
        the messages; ConfigError when the template is at fault.
        """
        if self._chat is None or self._probes is None:
            raise RequestError("the model has no chat template (chat_template.jinja or chat_template)")
        begins = check_ending(continue_final_message, add_generation_prompt)
        name = self._template_name(variables.pop("chat_template", None), bool(variables.get("tools")))
        values = {"tools": None, "documents": None, **self.special_tokens, **variables}
        plain = [
            {key: value for key, value in message.items() if value is not None}
            for message in _checked_messages(messages)
        ]
        continued = ContinuedMessage(plain) if continue_final_message else None
        if continued is not None:
            plain = continued.tagged(plain)
        tools = variables.get("tools")
        if (tools or has_calls(plain)) and not self._probes.takes_tools(name):
            plain = generic_messages(plain, tools or (), system=self._probes.takes_system(name))
            values["tools"] = None
        elif CALLS in self._chat.source(name):
            plain = list(map(with_short_ids, plain))
        values["messages"] = plain
        values["add_generation_prompt"] = begins
        text = self._render(self._chat, name, values)
        return text if continued is None else continued.cut(text)

    def _render(self, chat: ChatTemplates, name: str, values: Mapping[str, Any]) -> str:
        """Render a chat; if the template refuses the messages, try again in a form that most templates take."""
        try:
            return chat.render(name, values)
        except RequestError:
            absent = None if any(map(self.template_has, TESTS_OF_NONE)) else ""
            filled = [_as_most_take_it(message, absent) for message in values["messages"]]
            if filled == values["messages"]:
                raise
        return chat.render(name, {**values, "messages": filled})

    def _template_name(self, wanted: object, with_tools: bool) -> str:
        """Choose the template that renders a chat. Raises RequestError for one that the model does not have."""
        names = () if self._chat is None else self._chat.names
        if wanted is not None:
            if not isinstance(wanted, str) or wanted not in names:
                raise RequestError(f"chat_template {wanted!r:.80} is none of the model's: {', '.join(names)}")
            return wanted
        name = "tool_use" if with_tools and "tool_use" in names else "default"
        if name not in names:
            raise RequestError(f"the model has no default chat template, only {', '.join(names)}")
        return name

    def close(self) -> None:
        """End the chat template's process; a later use starts it again."""
        if self._chat is not None:
            self._chat.close()


def _too_long(what: str, max_context: int, max_tokens: int) -> RequestError:
    return RequestError(f"{what} and max_tokens {max_tokens} exceed {max_context} (max_context)")


def _checked_messages(messages: object) -> Sequence[Mapping[str, Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list, got {type(messages).__name__}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{index}] must be a mapping with a role")
    return messages


def _as_most_take_it(message: dict[str, Any], absent: str | None) -> dict[str, Any]:
    """Change an assistant's message for templates that restrict the content beside tool calls.

    Some write content even if it is absent, or look for calls only if it is none. gpt-oss's template has no place for
    both thinking and content before a call.
    """
    if message["role"] != "assistant":
        return message
    if "content" not in message:
        return {**message, "content": absent}
    thinking, content = message.get("thinking"), message["content"]
    if message.get("tool_calls") and isinstance(content, str) and isinstance(thinking, str) and thinking and content:
        return {**message, "content": "", "thinking": f"{thinking}\n\n{content}"}
    return message


def _find_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; {} if there is no file. Raises ConfigError for anything else."""
    text = find_text(path, MAX_CONFIG_BYTES)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid JSON: {error!s:.200}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object, found {type(value).__name__}")
    return value


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in every ConfigError that does not name one yet."""
    try:
        yield
    except ConfigError as error:
        if str(path.parent) in str(error):
            raise
        raise ConfigError(f"{path}: {error}") from error


def _build(data: bytes) -> Tokenizer:
    """Build a tokenizer from tokenizer.json; the library raises bare Exceptions, and panics on some files."""
    try:
        return Tokenizer.from_str(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8: byte {error.start}") from error
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ConfigError(f"is no tokenizer: {error!s:.200}") from error
        raise


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named special tokens' text; an entry is a string or an object with a content."""
    found = {}
    for name in SPECIAL_TOKENS:
        entry = config.get(name)
        text = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(text, str):
            found[name] = text
    return found


def _flag(path: Path, config: Mapping[str, Any], name: str) -> bool | None:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{path}: {name} must be true or false, got {value!r:.80}")
    return value


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name: separate files, and tokenizer_config.json's without chat_template.jinja."""
    source = find_text(directory / "chat_template.jinja", MAX_TEMPLATE_BYTES)
    if source is not None:
        named = {"default": source}
    else:
        named = _config_templates(directory / "tokenizer_config.json", config)
    folder = directory / ADDITIONAL_TEMPLATES
    paths = sorted(folder.glob("*.jinja")) if folder.is_dir() else []
    if len(paths) > MAX_TEMPLATES:
        raise ConfigError(f"{folder}: holds {len(paths)} templates; at most {MAX_TEMPLATES}")
    for path in paths:
        source = find_text(path, MAX_TEMPLATE_BYTES)
        if source is not None:
            named[path.stem] = source
    return named


def _template_file(directory: Path) -> Path:
    """Return the file with the chat templates, or the directory if there are several files."""
    if (directory / ADDITIONAL_TEMPLATES).is_dir():
        return directory
    file = directory / "chat_template.jinja"
    return file if file.exists() else directory / "tokenizer_config.json"


def _config_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of tokenizer_config.json: one, or a list of named ones."""
    entry = config.get("chat_template")
    if entry is None:
        return {}
    named = [{"name": "default", "template": entry}] if isinstance(entry, str) else entry
    if not isinstance(named, list):
        raise ConfigError(f"{path}: chat_template must be a string or a list, found {type(entry).__name__}")
    templates = {}
    for item in named:
        name, text = (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise ConfigError(f"{path}: an entry of chat_template must have a name and a template")
        if len(text) > MAX_TEMPLATE_BYTES:
            raise ConfigError(f"{path}: chat_template {name!r} is larger than {MAX_TEMPLATE_BYTES} characters")
        templates[name] = text
    return templates
