"""Numbers, times and errors as people say them, and text made safe for HTML."""

from __future__ import annotations

import html
import time
from pathlib import Path

from backend.catalog.family import part_label
from backend.schema.json_values import LAST_TIME, finite, printable
from backend.schema.messages import Trouble


def safe(text: object) -> str:
    """`text` for HTML, quotes included; what cannot be sent (half a character, a NUL) is replaced."""
    return html.escape(printable(text).replace("\0", "\ufffd"), quote=True)


CHOICES = {
    "modelscope": "ModelScope",
    "huggingface": "Hugging Face",
    "system": "As the system says",
    "light": "Light",
    "dark": "Dark",
}


def choice_words(choice: str) -> str:
    """A choice as people write it; names of methods and types stay as they are in files and flags."""
    return CHOICES.get(choice, choice)


def part_words(name: str) -> str:
    """A part of a model, or another share of memory, as people call it."""
    return part_label(name)


def size_words(num_bytes: float) -> str:
    """1536 MB reads "1.5 GB": binary steps, names as drives and cards are labelled."""
    value = max(finite(num_bytes) or 0.0, 0.0)
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GB"


def time_words(seconds: float) -> str:
    """As "8 s", "2 min 05 s" or "1 h 20 min"."""
    whole = max(int((finite(seconds, high=1e12) or 0.0) + 0.5), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def pace_words(seconds: float) -> str:
    """Seconds per step with as many digits as mean something."""
    if seconds <= 0:
        return "–"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2f} s"


def when_words(stamp: float, now: float) -> str:
    """As "just now", "5 min ago", "14:05" for today, "3 Nov, 14:05" before."""
    stamp = finite(stamp, low=0, high=LAST_TIME) or 0.0
    ago = now - stamp
    if ago < 60:
        return "just now"
    if ago < 3600:
        return f"{int(ago // 60)} min ago"
    then, today = time.localtime(stamp), time.localtime(now)
    clock = time.strftime("%H:%M", then)
    if then[:3] == today[:3]:
        return clock
    return f"{then.tm_mday} {time.strftime('%b', then)}, {clock}"


def value_words(value: object) -> str:
    """A setting's value in a line of others: files by their names, long texts cut."""
    if value is None or value == "" or value == ():
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple | list):
        return ", ".join(map(value_words, value))
    text = Path(str(value)).name if Path(str(value)).is_absolute() else str(value)
    return text if len(text) <= 40 else text[:39] + "…"


def count_words(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def notice(message: str, *, kind: str = "info", detail: str = "", about: str = "") -> str:
    """A boxed sentence; `kind` is "info", "good", "warn" or "bad". `detail` folds away; `about` is a line above: what
    it is about."""
    head = f'<p class="caption">{safe(about)}</p>' if about else ""
    fold = f"<details><summary>Details</summary><pre>{safe(detail[-4000:])}</pre></details>" if detail else ""
    return f'<div class="notice {kind}" role="status">{head}<p>{safe(message)}</p>{fold}</div>' if message else ""


def trouble_notice(trouble: Trouble, *, about: str = "") -> str:
    return notice(str(trouble), kind="bad", detail=trouble.detail, about=about)


def clock_words(stamp: float) -> str:
    """The time of day to the second: two requests of one minute can be told apart."""
    return time.strftime("%H:%M:%S", time.localtime(finite(stamp, low=0, high=LAST_TIME) or 0))


def faults_style(faults: dict[str, str], *, prefix: str) -> str:
    """Marks the fields (`#<prefix><name>`) whose value cannot be, each with its sentence below it."""
    if not faults:
        return ""
    rules = "".join(
        f"#{prefix}{name}::after{{content:{_css_text(say)};color:var(--bad);font-size:12.5px;line-height:1.35;margin-top:4px}}"
        f"#{prefix}{name} :is(input,textarea){{border-color:var(--bad)!important}}"
        f".fields:has(#{prefix}{name}) label>:last-child{{margin-top:0!important}}"
        for name, say in faults.items()
    )
    said = safe(" ".join(faults.values()))
    return f'<style>{rules}</style><p class="unseen" role="status">{said}</p>'


def _css_text(text: str) -> str:
    """`text` as a CSS string that may stand in HTML: what is not plain is written by its number."""
    return '"' + "".join(c if c.isalnum() or c in " .,:;-()/" else f"\\{ord(c):x} " for c in text) + '"'
