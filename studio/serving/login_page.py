"""The small pages that those see who may not in: one asks for the token or the login, the others say what is wrong. No scripts."""

from __future__ import annotations

import base64
import hashlib
from html import escape

STYLE = """
:root { color-scheme: light dark; --ground: #f7f7f8; --card: #fff; --line: #dcdce2; --ink: #27272a; --soft: #5b5b66; --accent: #4152b3; --wrong: #b42318; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #131316; --card: #1c1c20; --line: #34343c; --ink: #ececf1; --soft: #a9a9b4; --accent: #5467c9; --wrong: #f2a19a; }
}
* { box-sizing: border-box; }
body { margin: 0; min-height: 100vh; display: grid; place-items: center; padding: 20px; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { width: 100%; max-width: 460px; padding: 28px; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
h1 { margin: 0 0 4px; font-size: 22px; line-height: 1.3; }
p { margin: 8px 0 0; color: var(--soft); overflow-wrap: anywhere; }
label { display: block; margin-top: 14px; font-weight: 500; }
input { width: 100%; margin-top: 4px; padding: 9px 11px; font: inherit; color: inherit; background: var(--ground); border: 1px solid var(--line); border-radius: 7px; }
button { width: 100%; margin-top: 18px; padding: 10px; font: inherit; font-weight: 500; color: #fff; background: var(--accent); border: 0; border-radius: 7px; cursor: pointer; }
:is(input, button):focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
code { font: 14px ui-monospace, Menlo, Consolas, monospace; color: var(--ink); }
form + p { margin-top: 18px; }
.wrong { color: var(--wrong); }
"""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = "; ".join(
    (
        "default-src 'none'",
        f"style-src {_hash(STYLE)}",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    )
)


def asking_for_token(action: str, wrong: str = "") -> str:
    """The page for whoever comes without the token. `action` is where the form goes, `wrong` what was wrong with the last try."""
    return _page(
        "Loft is locked",
        f"""{_wrong(wrong)}
<p>This page needs a token. Open the address ending in <code>?token=…</code> that the terminal showed when Loft started, or paste the address or just the token here.</p>
<form method="post" action="{escape(action)}">
<label>Token or address<input name="token" type="password" autocomplete="current-password" autocapitalize="off" spellcheck="false" required autofocus></label>
<button>Open Loft</button>
</form>
<p>The token is also in the file <code>user/token</code> in Loft's data folder. This browser will remember it.</p>""",
    )


def asking_for_login(action: str, wrong: str = "") -> str:
    """As `asking_for_token`, where there are logins."""
    return _page(
        "Log in to Loft",
        f"""{_wrong(wrong)}
<form method="post" action="{escape(action)}">
<label>Name<input name="username" autocomplete="username" autocapitalize="off" spellcheck="false" required autofocus></label>
<label>Password<input name="password" type="password" autocomplete="current-password" required></label>
<button>Log in</button>
</form>""",
    )


def refusal(title: str, words: str) -> str:
    """A page that only says why not."""
    return _page(title, f"<p>{escape(words)}</p>")


def token_in(text: str) -> str:
    """The token in what was typed: the token itself, or the address that ends in it."""
    return text.strip().rpartition("token=")[2].partition("&")[0].strip()


def _wrong(words: str) -> str:
    return f'<p class="wrong" role="alert">{escape(words)}</p>' if words else ""


def _page(title: str, inside: str) -> str:
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head>
<body><main><h1>{escape(title)}</h1>
{inside}
</main></body></html>
"""
