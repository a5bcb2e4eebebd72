"""Numbers, times and errors as people say them, and text made safe for HTML."""

from __future__ import annotations

import html
import time

from backend.schema.messages import Trouble


def safe(text: object) -> str:
    """`text` for HTML, quotes included."""
    return html.escape(str(text), quote=True)


def size_words(num_bytes: float) -> str:
    """1536 MB reads "1.5 GB": binary steps, names as drives and cards are labelled."""
    value = float(max(num_bytes, 0))
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GB"


def time_words(seconds: float) -> str:
    """As "8 s", "2 min 05 s" or "1 h 20 min"."""
    whole = max(int(seconds + 0.5), 0)
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


def count_words(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def notice(message: str, *, kind: str = "info", detail: str = "") -> str:
    """A boxed sentence; `kind` is "info", "good", "warn" or "bad". `detail` folds away."""
    fold = f"<details><summary>Details</summary><pre>{safe(detail[-4000:])}</pre></details>" if detail else ""
    return f'<div class="notice {kind}" role="status"><p>{safe(message)}</p>{fold}</div>' if message else ""


def trouble_notice(trouble: Trouble) -> str:
    return notice(str(trouble), kind="bad", detail=trouble.detail)
