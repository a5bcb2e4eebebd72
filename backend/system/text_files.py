"""Text that people write: files of any encoding, lists with commas, ends of modules' names."""

from __future__ import annotations

import codecs
from pathlib import Path

from backend.schema.untrusted import read_bytes

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def listed(text: str | None) -> tuple[str, ...]:
    """The entries of a list with commas; empty ones are none."""
    return tuple(entry.strip() for entry in (text or "").split(",") if entry.strip())


def ends_with(name: str, end: str) -> bool:
    """Whether the dotted `name` of a module ends in the whole words `end`."""
    return name == end or name.endswith(f".{end}")


def decode_text(data: bytes) -> tuple[str, str]:
    """The text in `data` and the encoding it was taken for.

    A byte order mark decides; then NUL bytes on one side of every pair (UTF-16 without a mark); then UTF-8 where the
    bytes are legal; then GB18030 where that gives Chinese characters that are not stuck between western letters, as an
    accented letter read so would be; and Windows' western code page for the rest.
    """
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return data.decode(encoding, errors="replace"), encoding
    if len(data) >= 4 and len(data) % 2 == 0 and b"\0" in data and not _is_utf8_with_few_nuls(data):
        little = data[1::2].count(0) >= data[::2].count(0)
        encoding = "utf-16-le" if little else "utf-16-be"
        return data.decode(encoding, errors="replace"), encoding
    try:
        return data.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        pass
    try:
        text = data.decode("gb18030")
        if _share_chinese(text) > 0.5:
            return text, "gb18030"
    except UnicodeDecodeError:
        pass
    return data.decode("cp1252", errors="replace"), "cp1252"


def _is_utf8_with_few_nuls(data: bytes) -> bool:
    """Text of another width has a NUL for every letter of ASCII; single ones in UTF-8 are faults of the text."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return data.count(0) < len(data) / 8


def _share_chinese(text: str) -> float:
    foreign = [place for place, letter in enumerate(text) if ord(letter) > 127]
    padded = f" {text} "

    def is_word(place: int) -> bool:
        stuck = any(letter.isascii() and letter.isalpha() for letter in (padded[place], padded[place + 2]))
        return 0x4E00 <= ord(text[place]) <= 0x9FFF and not stuck

    return sum(map(is_word, foreign)) / max(len(foreign), 1)


def read_text(path: Path) -> tuple[str, str]:
    """The text of a file without a byte order mark or surrounding space, and its encoding.

    Raises Trouble("unreadable" | "missing_file").
    """
    text, encoding = decode_text(read_bytes(path))
    return text.lstrip("\ufeff").strip(), encoding
