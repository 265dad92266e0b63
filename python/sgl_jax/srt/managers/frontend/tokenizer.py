"""What the front end needs from a tokenizer, and how one is loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from sgl_jax.srt.server_args import ServerArgs, ServerArgsError


class Tokenizer(Protocol):
    """The slice of a transformers tokenizer that is used. ``encode`` adds the model's own special tokens unless told not to."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...


def load_tokenizer(args: ServerArgs) -> Tokenizer | None:
    """AutoTokenizer over the local folder (DECISIONS 26); None with ``--skip-tokenizer-init``.

    Never asks the network. Raises ServerArgsError when the folder holds no usable tokenizer.
    """
    if args.skip_tokenizer_init:
        return None
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(
            args.tokenizer_path, local_files_only=True, trust_remote_code=args.trust_remote_code
        )
    except Exception as error:
        raise ServerArgsError(
            "--tokenizer-path",
            args.tokenizer_path,
            f"holds no tokenizer that loads ({type(error).__name__}: {error})",
            "Give a folder with tokenizer.json and tokenizer_config.json, or --skip-tokenizer-init",
        ) from error
    if args.chat_template is not None:
        path = Path(args.chat_template)
        if not path.is_file():
            raise ServerArgsError("--chat-template", path, "is not a file", "Give the path of a Jinja file")
        tokenizer.chat_template = path.read_text()
    return tokenizer
