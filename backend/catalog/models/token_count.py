"""How many tokens a text has, by a model's own tokenizer, without torch: the package `tokenizers` alone reads it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TypeVar

from backend.schema.untrusted import is_file, read_object_or_empty

MOST_BYTES = 128 * 2**20  # of one of a tokenizer's files; the largest published have a quarter of it
MOST_KEPT = 200_000  # counts that are remembered of one tokenizer
# How Qwen2's tokenizer parts a text, as transformers' Qwen2Tokenizer builds it from vocab.json and merges.txt.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LOCK = Lock()
Found = TypeVar("Found")


def counts(folder: Path, texts: Sequence[str]) -> list[int] | None:
    """Tokens of each of `texts` by the tokenizer in `folder`, special words in them as one each; None where there is
    none that can be read.

    A text is counted once for as long as the tokenizer's files stay as they are.
    """
    found = _tokenizer(str(folder), _stamp(folder))
    if found is None:
        return None
    tokenizer, known = found

    def tokens(clean: list[str]) -> list[int]:
        # one text after the other where there are few: the library's pool of threads gains nothing there
        return [len(one.ids) for one in tokenizer.encode_batch_fast(clean)]

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
            each = _tried(lambda: tokens(clean))
            if each is None:
                return None
            known |= zip(missing, each, strict=True)
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
    home = Path(folder)
    if any(size > MOST_BYTES for _, size in stamp):
        return None
    if is_file(home / "tokenizer.json"):
        found = _tried(lambda: _from_file(home))
    elif is_file(home / "vocab.json") and is_file(home / "merges.txt"):
        found = _tried(lambda: _from_vocabulary(home))
    else:
        return None
    return None if found is None else (found, {})


def _tried(act: Callable[[], Found]) -> Found | None:
    """What `act` gives, or None where the library fails: with `Exception` itself for a file that is none of a
    tokenizer's or a text that this one does not take, and with what is no `Exception` where its own code, which is not
    Python, gives up on a file that it has taken."""
    try:
        return act()
    except Exception:
        return None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's, in a module that cannot be imported
            raise
        return None


def _from_file(home: Path):
    import tokenizers

    found = tokenizers.Tokenizer.from_file(str(home / "tokenizer.json"))
    found.no_truncation()
    found.no_padding()
    return found


def _from_vocabulary(home: Path):
    """Qwen2's tokenizer from its older files."""
    import tokenizers

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
