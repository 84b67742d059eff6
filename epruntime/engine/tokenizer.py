"""The model's tokenizer, behind the few calls that the front end needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from epruntime.engine import chat_template, template_form, template_kwargs
from epruntime.engine.template_form import Form
from epruntime.engine.token_bound import bound_of
from epruntime.errors import CheckpointError, ConfigError, InvalidRequestError
from epruntime.message_text import text_of, valid_text

logger = logging.getLogger("epruntime.engine.tokenizer")

#: any of these in a directory says that it holds a tokenizer
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


class Tokenizer:
    """Text to ids and back, through transformers' AutoTokenizer (no remote code).

    One thread may encode while others decode: what the library changes in a tokenizer at a call (it takes back padding
    and truncation that the file asks for) is changed before the constructor returns.

    Args:
        path: directory of the tokenizer.
        template: Jinja source of a chat template that takes the place of the tokenizer's own.

    Raises:
        CheckpointError: the files cannot be read. ConfigError: `template` is no Jinja template.
    """

    def __init__(self, path: str | Path, *, template: str | None = None) -> None:
        from transformers import AutoTokenizer

        try:
            self.hf = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
            self._bos = self._own_bos()
            self._bound = bound_of(self.hf)
        except Exception as error:  # the library trusts the files' contents, and raises what comes of it
            raise CheckpointError(f"cannot load the tokenizer in {path}: {type(error).__name__}: {error}") from error
        if template is not None:
            self.hf.chat_template = template
            chat_template.check(self.hf)
        elif not self.has_chat_template:
            self.hf.chat_template = chat_template.of_processor(Path(path))
        self._form = template_form.read(self.hf, chat_template.TEMPLATE_S) if self.has_chat_template else Form()

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.hf, "chat_template", None))

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens that the tokenizer itself adds.

        Where one of them is a BOS, the prompt begins with exactly one, whether or not the text brings it along.
        """
        return self._encode(text, add_special_tokens=True)

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        keywords: dict[str, Any] | None = None,
        check: Callable[[str], None] | None = None,
    ) -> tuple[str, list[int]]:
        """Renders chat messages through the model's chat template.

        Args:
            keywords: for the template; those that it does not read change nothing.
            check: called with the rendered prompt before it is tokenised; what it raises ends this.

        Returns:
            The rendered prompt and its ids; the template writes all special tokens, so none is added.

        Raises:
            InvalidRequestError: no template, or one that refuses the messages, or does not end with them, or shows
                nothing of one; or keywords that are not the caller's.
        """
        if not self.has_chat_template:
            raise InvalidRequestError(
                "the model has no chat template; send a plain prompt instead, or start with --chat-template FILE",
                field="messages",
            )
        messages = _checked(messages)
        more = template_kwargs.checked(keywords, self.hf)
        text = chat_template.render(self.hf, messages, more, form=self._form)
        if check is not None:
            check(text)
        return text, self._encode(text, add_special_tokens=False)

    def tokens_at_least(self, text: str) -> int:
        """Ids that `text` has at least, told by its length alone; 0 where nothing is certain."""
        if self._bound is None:
            return 0
        start, bos = 0, self.hf.bos_token
        while self._bos is not None and text.startswith(bos, start):  # all of them become one
            start += len(bos)
        return self._bound.tokens_at_least(text[start:])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self.hf.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"not valid Unicode text: {error}", field="prompt") from error
        ids: list[int] = self.hf.encode(text, add_special_tokens=add_special_tokens)
        if self._bos is not None:
            extra = 0
            while ids[extra : extra + 2] == [self._bos, self._bos]:
                extra += 1
            del ids[:extra]
        return ids

    def _own_bos(self) -> int | None:
        """The BOS id that the tokenizer puts before every text; None if it does not."""
        bos: int | None = self.hf.bos_token_id
        with_added = self.hf.encode("a", add_special_tokens=True)
        without = self.hf.encode("a", add_special_tokens=False)
        return bos if bos is not None and with_added[:1] == [bos] and without[:1] != [bos] else None


def _checked(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with contents that are strings."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequestError("must be a non-empty list of {'role', 'content'} messages", field="messages")
    return [_checked_message(message, f"messages.{number}") for number, message in enumerate(messages)]


def _checked_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError("needs a 'role', which is a string, and a 'content'", field=where, value=message)
    valid_text(message["role"], f"{where}.role")
    return {**message, "content": text_of(message.get("content"), f"{where}.content")}


def load_tokenizer(path: str | Path, *, required: bool, chat_template: str | None = None) -> Tokenizer | None:
    """Loads the tokenizer of a directory; None, with a warning, where there is none and it is not `required`.

    Without a tokenizer only prompts of token ids are accepted and no text is returned.

    Args:
        chat_template: file whose Jinja template takes the place of the tokenizer's own.

    Raises:
        CheckpointError: there is none and it is required, or its files cannot be read.
        ConfigError: `chat_template` cannot be read, is no template, or has no tokenizer to go with.
    """
    template = None if chat_template is None else _read_template(Path(chat_template))
    if not any((Path(path) / name).exists() for name in TOKENIZER_FILES):
        if required:
            raise CheckpointError(f"{path} holds no tokenizer ({', '.join(TOKENIZER_FILES)})")
        if template is not None:
            raise ConfigError(f"chat_template={chat_template!r} needs a tokenizer, and {path} holds none: name one")
        logger.warning("%s holds no tokenizer: prompts must be token ids, and outputs carry no text", path)
        return None
    return Tokenizer(path, template=template)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat_template={str(path)!r} cannot be read: {error}; name a file with a template"
        ) from error
