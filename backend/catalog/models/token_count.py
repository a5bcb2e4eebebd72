"""How many tokens a text has, by a model's own tokenizer, without torch: the package `tokenizers` alone reads it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock

from backend.schema.untrusted import is_file, read_object_or_empty

MOST_BYTES = 128 * 2**20  # of one of a tokenizer's files; the largest published have a quarter of it
MOST_KEPT = 200_000  # counts that are remembered of one tokenizer
# How Qwen2's tokenizer parts a text, as transformers' Qwen2Tokenizer builds it from vocab.json and merges.txt.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LOCK = Lock()


def counts(folder: Path, texts: Sequence[str]) -> list[int] | None:
    """Tokens of each of `texts` by the tokenizer in `folder`, special words in them as one each; None where there is
    none that can be read.

    A text is counted once for as long as the tokenizer's files stay as they are.
    """
    found = _tokenizer(str(folder), _stamp(folder))
    if found is None:
        return None
    tokenizer, known = found
    missing = list({text for text in texts if text not in known})
    if missing:
        clean = [
            text.encode("utf-8", "replace").decode() for text in missing
        ]  # half of a pair of surrogates is no text
        with _LOCK:
            if len(known) + len(missing) > MOST_KEPT:
                known.clear()
                missing = list(set(texts))
                clean = [text.encode("utf-8", "replace").decode() for text in missing]
            # one text after the other where there are few: the library's pool of threads gains nothing there
            known |= zip(missing, (len(one.ids) for one in tokenizer.encode_batch_fast(clean)), strict=True)
    return [known[text] for text in texts]


def _stamp(folder: Path) -> tuple[tuple[int, int], ...]:
    found = []
    for name in ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"):
        try:
            status = (folder / name).stat()
            found.append((status.st_mtime_ns, status.st_size))
        except OSError:
            found.append((0, 0))
    return tuple(found)


@lru_cache(maxsize=4)
def _tokenizer(folder: str, stamp: tuple) -> tuple | None:
    """(tokenizer, text -> how many tokens it has), or None."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import tokenizers

        home = Path(folder)
        if any(size > MOST_BYTES for _, size in stamp):
            return None
        if is_file(home / "tokenizer.json"):
            found = tokenizers.Tokenizer.from_file(str(home / "tokenizer.json"))
            found.no_truncation()
            found.no_padding()
        elif is_file(home / "vocab.json") and is_file(home / "merges.txt"):
            found = _from_vocabulary(tokenizers, home)
        else:
            return None
    except Exception:  # the library raises Exception itself for a file that is none of a tokenizer's
        return None
    return found, {}


def _from_vocabulary(tokenizers, home: Path):
    """Qwen2's tokenizer from its older files."""
    model = tokenizers.models.BPE.from_file(str(home / "vocab.json"), str(home / "merges.txt"))
    found = tokenizers.Tokenizer(model)
    found.normalizer = tokenizers.normalizers.NFC()
    found.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(_PIECES), behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    said = read_object_or_empty(home / "tokenizer_config.json")
    special = [one["content"] for one in said.get("added_tokens_decoder", {}).values()]
    found.add_special_tokens(special or ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return found
