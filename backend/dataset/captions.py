"""What becomes of a caption before it is encoded."""

from __future__ import annotations

from pathlib import Path
from random import Random

from backend.schema.messages import Trouble
from backend.schema.untrusted import is_file
from backend.system.text_files import read_text


def check_caption(caption: str, where: str) -> None:
    """Raises Trouble for a caption with a NUL in it: a file that was damaged or read in the wrong encoding."""
    if "\0" in caption:
        raise Trouble(
            "bad_metadata",
            f"{where} holds a NUL character after {caption.partition(chr(0))[0][-40:]!r}.",
            hint="Save the file as UTF-8, or write the caption anew.",
        )


def with_trigger(caption: str, trigger: str) -> str:
    """The caption, after the trigger word unless it holds it already."""
    trigger = trigger.strip()
    if not trigger or trigger.lower() in caption.lower():
        return caption
    return f"{trigger}, {caption}" if caption.strip() else trigger


def drawn(captions: tuple[str, ...], random: Random, *, dropout: float, shuffle: bool) -> str:
    """One of the captions, now and then an empty one. Empty is "" or " ": both are used for unguided prediction."""
    caption = captions[random.randrange(len(captions))]
    if random.random() < dropout:
        return ("", " ")[random.randrange(2)]
    if shuffle:
        first, *rest = caption.split(",")
        random.shuffle(rest)
        caption = ",".join([first, *rest])
    return caption


def lines_of(text: str) -> list[str]:
    """Prompts in a setting: one per line, or the lines of the text file that it names."""
    text = text.strip()
    if "\n" not in text and text.lower().endswith(".txt") and is_file(Path(text)):
        text, _ = read_text(Path(text))
    return [line.strip() for line in text.splitlines() if line.strip()]
