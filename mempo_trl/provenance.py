"""What a result is made of, as hashes: two runs with equal hashes were asked the same."""

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
from transformers import PreTrainedTokenizerBase


def text_hash(text: str) -> str:
    """The first 16 hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Tells tokenizers apart that count tokens differently, wherever they are loaded from."""
    words = sorted(tokenizer.get_vocab().items())
    # The vocabulary does not tell how a text is cut into it.
    model = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else type(tokenizer).__name__
    rules = json.loads(model) if tokenizer.is_fast else {"class": model}
    for name in ("padding", "truncation", "added_tokens"):  # set by calls, and part of the vocabulary
        rules.pop(name, None)
    return text_hash(json.dumps([words, rules], sort_keys=True))


def weights_stamp(name_or_path: str) -> str | None:
    """Names, sizes and times of the weights in a local folder as a hash: a model that was trained anew is another."""
    folder = Path(name_or_path)
    if not folder.is_dir():
        return None
    files = sorted(file for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern))
    return text_hash(repr([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]))


def without_secrets(value: Any) -> Any:
    """Settings for a file: of every URL in them the user, the query and the fragment are left out."""
    if isinstance(value, dict):
        return {name: without_secrets(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(part) for part in value]
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        return str(httpx.URL(value).copy_with(userinfo=b"", query=None, fragment=None))
    return value
