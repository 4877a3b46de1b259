"""A checkpoint's tokenizer: `tokenizer.json` and the chat template of `tokenizer_config.json`.

`Tokenizer` turns text or messages into token ids and back. `TextDecoder` does the way back one
token at a time, exactly: its pieces put together are what `Tokenizer.decode` makes of all the
tokens, also where their bytes are not valid UTF-8. Stop strings are not here; see `serving.text`.
"""

import codecs
import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TEMPLATE_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplateError(ValueError):
    """The chat template is missing or refuses these messages; the message says which."""


@runtime_checkable
class TextDecoder(Protocol):
    """Tokens to text, one at a time."""

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before; whole characters."""
        ...

    def finish(self) -> str:
        """The rest, once no more tokens come."""
        ...


class Tokenizer:
    """Make one with `load`.

    Attributes:
      vocab_size: tokens the tokenizer knows. A model's vocabulary may be padded beyond it; ids
        without a token decode to nothing.
      bos_token, eos_token: as the configuration names them, or None.
      bos_token_id, eos_token_id: their ids, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any] | None = None,
        *,
        chat_template: str | None = None,
    ):
        config = config or {}
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._special_ids = {
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._special_tokens = {
            name: _token_text(config[name], name)
            for name in _TEMPLATE_TOKENS
            if config.get(name) is not None
        }
        self.bos_token = self._special_tokens.get("bos_token")
        self.eos_token = self._special_tokens.get("eos_token")
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self._adds_bos: bool | None = config.get("add_bos_token")
        self._adds_eos: bool | None = config.get("add_eos_token")
        self._template = _compile(chat_template) if chat_template is not None else None
        decoders = _decoder_types(backend)
        self._is_byte_level = decoders == ["ByteLevel"]
        self._has_byte_tokens = "ByteFallback" in decoders

    @classmethod
    def load(cls, model_dir: Path | str) -> "Tokenizer":
        """Read the tokenizer of a model directory.

        Raises FileNotFoundError or ValueError with the path.
        """
        folder = Path(model_dir)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer.json in {folder}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer: {error}") from error
        config_path = folder / "tokenizer_config.json"
        config = _read_object(config_path) if config_path.is_file() else {}
        template_path = folder / "chat_template.jinja"
        if template_path.is_file():
            template = template_path.read_text(encoding="utf-8")
        else:
            template = _default_template(config.get("chat_template"), config_path)
        try:
            return cls(backend, config, chat_template=template)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a text; `add_special_tokens` puts those around it that the model expects.

        `add_bos_token` and `add_eos_token` of the configuration decide which, else tokenizer.json.
        """
        by_config = self._adds_bos is not None or self._adds_eos is not None
        ids = self._backend.encode(
            text, add_special_tokens=add_special_tokens and not by_config
        ).ids
        if add_special_tokens and by_config:
            before = [self.bos_token_id] if self._adds_bos and self.bos_token_id is not None else []
            after = [self.eos_token_id] if self._adds_eos and self.eos_token_id is not None else []
            ids = before + ids + after
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens. Invalid UTF-8 becomes U+FFFD, ids without a token nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def text_decoder(self, skip_special_tokens: bool = True) -> TextDecoder:
        """What decodes one sequence token by token, at a constant cost for each."""
        if self._is_byte_level:
            return _ByteLevelDecoder(self, skip_special_tokens)
        return _WindowDecoder(self, skip_special_tokens)

    def is_visible(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Whether `decode` looks at this token at all."""
        if skip_special_tokens and token_id in self._special_ids:
            return False
        return self._backend.id_to_token(token_id) is not None

    def is_byte_token(self, token_id: int) -> bool:
        """Whether this is one byte of a character the vocabulary lacks (`<0xE2>`)."""
        token = self._backend.id_to_token(token_id)
        return self._has_byte_tokens and token is not None and bool(_BYTE_TOKEN.fullmatch(token))

    def id_to_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes a token stands for in running text, possibly part of a character."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            try:
                return bytes(_BYTE_OF[char] for char in token)
            except KeyError:  # a token added as plain text
                return token.encode()
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if token_id in self._special_ids:
            return token.encode()
        return token.replace("▁", " ").encode()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Tokens of a conversation. No special tokens are added: the template writes them.

        Raises ChatTemplateError if there is no template or it refuses the messages.
        """
        text = self.render_chat(messages, add_generation_prompt, variables)
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text `apply_chat_template` encodes. `variables` are for the template; they cannot
        replace the conversation or the special tokens."""
        if self._template is None:
            raise ChatTemplateError(
                "this model has no chat template (chat_template in tokenizer_config.json or "
                "chat_template.jinja)"
            )
        values = {
            **(variables or {}),
            **self._special_tokens,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(values)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise ChatTemplateError(f"the chat template refused the messages: {error}") from error

    def _id_of(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        if token is None:
            return None
        token_id = self._backend.token_to_id(token)
        if token_id is None:
            raise ValueError(f"{name} {token!r} is not in the vocabulary")
        return token_id


class _ByteLevelDecoder:
    """For vocabularies whose tokens are bytes: exact with nothing but an open character kept."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if not self._tokenizer.is_visible(token_id, self._skip_special_tokens):
            return ""
        return self._utf8.decode(self._tokenizer.id_to_bytes(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """For vocabularies whose tokens are text: what a token adds is seen by decoding it after the
    few tokens that came before it, since only the first token of a text is treated differently.

    A run of byte tokens decodes as a whole (one invalid byte spoils all of it), so it is kept until
    it ends.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # context, then tokens whose text is not out yet
        self._num_context = 0

    def push(self, token_id: int) -> str:
        if not self._tokenizer.is_visible(token_id, self._skip_special_tokens):
            return ""
        self._window.append(token_id)
        return "" if self._tokenizer.is_byte_token(token_id) else self.finish()

    def finish(self) -> str:
        known = self._decode(self._window[: self._num_context])
        text = self._decode(self._window)[len(known) :]
        if text:
            # Only tokens with text can be the context: one without would not be "what came first".
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _decoder_types(backend: tokenizers.Tokenizer) -> list[str]:
    """The decoder's steps; refuses those whose text of a prefix is not a prefix of the text."""
    decoder = json.loads(backend.to_str())["decoder"]
    if decoder is None:
        return []
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    types = [step["type"] for step in steps]
    if types == ["ByteLevel"]:
        return types
    for step in steps:
        if step["type"] not in ("Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"):
            raise ValueError(f"tokenizer decoder {step['type']!r} is not supported here ({types})")
        if step["type"] == "Strip" and (step["start"] > 1 or step["stop"] > 0):
            raise ValueError(f"tokenizer decoder Strip must only strip one from the start: {step}")
    if "Replace" in types and "Fuse" in types[: types.index("Replace")]:
        raise ValueError(f"tokenizer decoder Replace must stand before Fuse, got {types}")
    return types


def _byte_of_char() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF = _byte_of_char()


def byte_level_alphabet() -> list[str]:
    """Token strings of the 256 bytes, in byte order."""
    return sorted(_BYTE_OF, key=_BYTE_OF.__getitem__)


def _compile(source: str) -> jinja2.Template:
    """A chat template with what transformers gives one: loop controls and these helpers."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any):
        # Jinja's own escapes for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    def strftime_now(format: str) -> str:
        return datetime.datetime.now().strftime(format)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"the chat template is not valid: {error}") from error


def _token_text(value: Any, name: str) -> str:
    """A special token, given as a string or as an object with its `content`."""
    text = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a string or an object with content, got {value!r}")
    return text


def _default_template(value: Any, path: Path) -> str | None:
    """`chat_template` is a string or a list of named ones, of which "default" is used."""
    if value is None or isinstance(value, str):
        return value
    named: dict[Any, Any] = {}
    if isinstance(value, Mapping):
        named = dict(value)
    elif isinstance(value, Iterable):
        named = {
            entry.get("name"): entry.get("template")
            for entry in value
            if isinstance(entry, Mapping)
        }
    template = named.get("default")
    if not isinstance(template, str):
        raise ValueError(f"{path}: chat_template must be a string or have one named 'default', "
                         f"got the names {sorted(map(str, named))}")  # fmt: skip
    return template


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value
