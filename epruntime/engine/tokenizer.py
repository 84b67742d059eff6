"""The model's tokenizer, behind the few calls that the front end needs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from epruntime.errors import CheckpointError, InvalidRequestError

logger = logging.getLogger("epruntime.engine.tokenizer")

#: any of these in a directory says that it holds a tokenizer
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


class Tokenizer:
    """Text to ids and back, through transformers' AutoTokenizer (no remote code)."""

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoTokenizer

        try:
            self.hf = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
        except Exception as error:  # the library trusts the files' contents, and raises what comes of it
            raise CheckpointError(f"cannot load the tokenizer in {path}: {type(error).__name__}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens that the tokenizer itself adds (such as one BOS)."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> tuple[str, list[int]]:
        """Renders chat messages through the model's chat template.

        Returns:
            The rendered prompt and its ids; the template writes all special tokens, so none is added.

        Raises:
            InvalidRequestError: no template, or one that refuses the messages.
        """
        if not getattr(self.hf, "chat_template", None):
            raise InvalidRequestError("the model has no chat template; send a plain prompt instead", field="messages")
        _check_messages(messages)
        # jinja2 is what transformers renders templates with, so it is there whenever a template is
        from jinja2.exceptions import TemplateError

        try:
            text = self.hf.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise InvalidRequestError(f"the chat template refuses these messages: {error}", field="messages") from error
        return text, self._encode(text, add_special_tokens=False)

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
        return ids


def _check_messages(messages: Sequence[dict[str, Any]]) -> None:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequestError("must be a non-empty list of {'role', 'content'} messages", field="messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRequestError("each message needs a 'role' and a 'content'", field="messages", value=message)
        if not isinstance(message.get("content"), str):
            raise InvalidRequestError("only text content is supported", field="messages", value=message)


def load_tokenizer(path: str | Path, *, required: bool) -> Tokenizer | None:
    """Loads the tokenizer of a directory; None, with a warning, where there is none and it is not `required`.

    Without a tokenizer only prompts of token ids are accepted and no text is returned.
    """
    if not any((Path(path) / name).exists() for name in TOKENIZER_FILES):
        if required:
            raise CheckpointError(f"{path} holds no tokenizer ({', '.join(TOKENIZER_FILES)})")
        logger.warning("%s holds no tokenizer: prompts must be token ids, and outputs carry no text", path)
        return None
    return Tokenizer(path)
