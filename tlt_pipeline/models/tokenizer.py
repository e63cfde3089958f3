"""Text to token ids and back, from the tokenizer files of a Hugging Face folder. No torch here.

transformers imports torch with its tokenizers, and the scheduler, which renders prompts, runs without; so
this is built on the `tokenizers` library that transformers uses itself, and gives the same ids. The chat
template is rendered as transformers does it (sandboxed: a template from a hub is foreign code).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import tokenizers
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from tlt_pipeline.models.locate import ModelError

PAD, EOS = "<pad>", "<eos>"
_KEPT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


class Tokenizer:
    """A fast tokenizer with what generation needs: where answers end, how chats are written.

    `files` are the folder's tokenizer files, byte for byte: `save` writes them again, so every weight set
    carries the same tokenizer. Instances don't change and may be shared between threads."""

    def __init__(self, files: Mapping[str, bytes], eos_ids: tuple[int, ...] = ()) -> None:
        """`eos_ids` adds to what the files name. Raises ModelError if they are no tokenizer."""
        self.files = dict(files)
        try:
            self._backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"tokenizer.json can't be read: {_one_line(error)}") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self._config: dict[str, Any] = json.loads(files.get("tokenizer_config.json", b"{}"))
        self.eos_ids = self._read_eos_ids(eos_ids)
        """Ids that end an answer, in ascending order."""
        pad = self._token_id(self._special("pad_token"))
        self.pad_id: int = pad if pad is not None else (self.eos_ids[0] if self.eos_ids else 0)

    @property
    def vocab_size(self) -> int:
        """Number of ids in use; the model's vocabulary may be padded to more."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone. Raises ModelError for a character that the vocabulary lacks."""
        try:
            return self._backend.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(self._explain(text, error)) from error

    @cached_property
    def bos_ids(self) -> tuple[int, ...]:
        """What the tokenizer puts before a text that stands for itself (Llama 3: one id); often nothing."""
        alone = self._backend.encode("", add_special_tokens=True).ids
        bos = self._token_id(self._special("bos_token"))
        return tuple(token for token in alone if token == bos or token not in self.eos_ids)

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a prompt without a chat template: `bos_ids`, then the text."""
        return [*self.bos_ids, *self.encode(text)]

    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=not keep_special)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Messages ({"role", "content"}) as text, up to where the assistant's answer begins."""
        if self._template is None:
            raise ModelError("this tokenizer has no chat template: set task.chat to off or give the folder one")
        names = {key: self._special(key) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
        known = {key: token for key, token in names.items() if token is not None}
        try:
            return self._template.render(
                messages=[dict(message) for message in messages], add_generation_prompt=True, **known
            )
        except TemplateError as error:
            raise ModelError(f"the chat template refuses these messages: {_one_line(error)}") from error

    def apply_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of `render_chat`; the template writes the special tokens itself."""
        return self.encode(self.render_chat(messages))

    def save(self, folder: Path) -> None:
        """Writes the tokenizer's files into an existing folder."""
        for name, content in self.files.items():
            (folder / name).write_bytes(content)

    @cached_property
    def _chat_template(self) -> str | None:
        if "chat_template.jinja" in self.files:
            return self.files["chat_template.jinja"].decode()
        found: Any = json.loads(self.files.get("chat_template.json", b"{}")).get("chat_template")
        found = found if found is not None else self._config.get("chat_template")
        if isinstance(found, list):  # several, by name
            entries = cast(list[dict[str, str]], found)
            return {entry["name"]: entry["template"] for entry in entries}.get("default")
        return found

    @cached_property
    def _template(self) -> Any:
        if self._chat_template is None:
            return None
        try:
            return _template_environment().from_string(self._chat_template)
        except TemplateError as error:
            raise ModelError(f"the chat template is no valid Jinja: {_one_line(error)}") from error

    def _special(self, key: str) -> str | None:
        value: Any = self._config.get(key)
        if value is None:
            value = json.loads(self.files.get("special_tokens_map.json", b"{}")).get(key)
        return cast(dict[str, str], value)["content"] if isinstance(value, dict) else value

    def _token_id(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)

    def _read_eos_ids(self, given: tuple[int, ...]) -> tuple[int, ...]:
        listed = json.loads(self.files.get("generation_config.json", b"{}")).get("eos_token_id")
        ids = set(given) | set(_as_ids(listed))
        own = self._token_id(self._special("eos_token"))
        return tuple(sorted(ids if own is None else ids | {own}))

    def _explain(self, text: str, error: Exception) -> str:
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        unknown = sorted({character for character in text if character not in vocabulary})
        if unknown and "UNK" in str(error):
            shown = ", ".join(repr(character) for character in unknown[:5])
            return f"the tokenizer's alphabet lacks {shown}: use another model or change the prompts"
        return f"text can't be encoded: {_one_line(error)}"


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Reads tokenizer.json and what stands beside it. Raises ModelError if the folder has none."""
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json: write one with transformers, "
            f"AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    files = {name: (folder / name).read_bytes() for name in _KEPT_FILES if (folder / name).is_file()}
    eos: tuple[int, ...] = ()
    if "generation_config.json" not in files and (folder / "config.json").is_file():
        eos = _as_ids(json.loads((folder / "config.json").read_bytes()).get("eos_token_id"))
    return Tokenizer(files, eos)


def character_tokenizer(alphabet: str) -> Tokenizer:
    """One token a character: <pad> 0, <eos> 1, then the alphabet's distinct characters in the order given.

    transformers' AutoTokenizer loads what `save` writes. Other characters are an error, not <unk>."""
    if not alphabet:
        raise ModelError("the alphabet is empty: name the characters that the model reads and writes")
    vocabulary = {PAD: 0, EOS: 1}
    for character in alphabet:
        vocabulary.setdefault(character, len(vocabulary))
    backend: Any = tokenizers.Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, EOS)])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
    }
    files = {
        "tokenizer.json": backend.to_str(pretty=True).encode(),
        "tokenizer_config.json": json.dumps(config, indent=2).encode(),
        "generation_config.json": json.dumps({"eos_token_id": 1, "pad_token_id": 0}, indent=2).encode(),
    }
    return Tokenizer(files)


def _template_environment() -> ImmutableSandboxedEnvironment:
    """The names and filters that chat templates count on (transformers: utils/chat_template_utils.py)."""

    def fail(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def format_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "extensions": [loopcontrols]}
    environment: Any = ImmutableSandboxedEnvironment(**options)
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=fail, strftime_now=format_now)
    return environment


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
