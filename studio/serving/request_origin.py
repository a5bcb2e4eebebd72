"""What a request says about itself: who asks, under which name of this machine, and from which page.

Every value comes from the other side and is judged in `hosts`; only a trusted proxy's `X-Forwarded-*` headers count.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote_plus

HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(?::([0-9]{1,5}))?")
DEFAULT_PORTS = {"http": 80, "https": 443}
# Whoever is no trusted proxy could set these; what stands behind must not believe them.
FORWARDED = (b"forwarded", b"via", b"x-gradio-server", b"x-real-ip")
FORWARDED_START = b"x-forwarded-"
SECRET = (b"cookie", b"authorization", b"proxy-authorization")


@dataclass(frozen=True)
class Asked:
    """One request. `host` is None where the header is missing, there twice, or no host's name."""

    method: str
    path: str  # without the path of a proxy
    query: tuple[tuple[str, str], ...]
    scheme: str
    host: str | None  # lower case, without brackets
    port: int
    here: str  # the address of this machine at which the connection arrived
    address: str  # whose request it is
    origins: tuple[str, ...]
    site: str | None  # Sec-Fetch-Site; no value that counts where it is there twice
    is_page_opened: bool  # a browser's window goes there
    wants_page: bool  # HTML is an answer
    cookies: tuple[tuple[str, str], ...]
    bearer: str

    def values(self, name: str) -> list[str]:
        """The values of `name` in the query."""
        return [value for key, value in self.query if key == name]

    @property
    def changes_something(self) -> bool:
        return self.method not in ("GET", "HEAD", "OPTIONS")


def asked(scope: dict, *, proxies: Sequence[ipaddress._BaseNetwork] = (), root_path: str = "") -> Asked:
    """The request of an ASGI scope."""
    headers = _Headers(scope)
    peer, scheme, host = (scope.get("client") or ("", 0))[0], scope.get("scheme", "http"), headers.only("host")
    address = peer
    if is_among(peer, proxies):
        address = _client_behind(headers.all("x-forwarded-for"), proxies) or peer
        said = headers.first("x-forwarded-proto").lower()
        scheme = said if said in DEFAULT_PORTS else scheme
        host = headers.first("x-forwarded-host") or host
    name, port = host_and_port(host, scheme)
    scheme_word, _, credentials = headers.first("authorization", whole=True).partition(" ")
    return Asked(
        method=scope["method"].upper(),
        path=path_of(scope["path"], root_path),
        query=query_of(scope.get("query_string", b"").decode("latin-1")),
        scheme=scheme,
        host=name,
        port=port,
        here=(scope.get("server") or ("", 0))[0] or "",
        address=address,
        origins=tuple(headers.all("origin")),
        site=",".join(headers.all("sec-fetch-site")) if headers.all("sec-fetch-site") else None,
        is_page_opened=headers.first("sec-fetch-mode") == "navigate" and headers.first("sec-fetch-dest") == "document",
        wants_page="text/html" in headers.first("accept", whole=True).lower(),
        cookies=_cookies(headers.all("cookie")),
        bearer=credentials.strip() if scheme_word.lower() == "bearer" else "",
    )


def plain_scope(scope: dict, question: Asked) -> dict:
    """The scope for what stands behind: with what a trusted proxy said, without its path, forwarded headers and secrets."""
    port = "" if question.port == DEFAULT_PORTS[question.scheme] else f":{question.port}"
    host = f"[{question.host}]" if ":" in question.host else question.host
    headers = [
        (name, value)
        for name, value in scope["headers"]
        if name not in (*FORWARDED, *SECRET, b"host") and not name.startswith(FORWARDED_START)
    ]
    headers.append((b"host", f"{host}{port}".encode("ascii")))
    return {
        **scope,
        "path": question.path,
        "scheme": question.scheme,
        "client": (question.address, 0),
        "headers": headers,
    }


def path_of(path: str, root_path: str) -> str:
    """`path` without `root_path`, under which a proxy may or may not hand requests on."""
    root = root_path.rstrip("/")
    if root and (path == root or path.startswith(root + "/")):
        return path[len(root) :] or "/"
    return path


def query_of(text: str) -> tuple[tuple[str, str], ...]:
    """The pairs of a query or of a form; whatever it says, there is an answer."""
    pairs = (part.partition("=") for part in text.split("&") if part)
    return tuple((unquote_plus(name), unquote_plus(value)) for name, _, value in pairs)


def host_and_port(text: str | None, scheme: str) -> tuple[str | None, int]:
    """The name and the port in a Host header; None for what is none."""
    found = HOST.fullmatch((text or "").strip().lower())
    if not found:
        return None, 0
    port = int(found[2]) if found[2] else DEFAULT_PORTS[scheme if scheme in DEFAULT_PORTS else "http"]
    return (found[1].strip("[]"), port) if port < 65536 else (None, 0)


def plain_address(text: str) -> str:
    """An IP address in one spelling (an IPv4 address inside IPv6 as IPv4, no zone); "" for what is none."""
    try:
        found = ipaddress.ip_address(text.strip().strip("[]").partition("%")[0])
    except ValueError:
        return ""
    return str(getattr(found, "ipv4_mapped", None) or found)


def is_among(address: str, networks: Sequence[ipaddress._BaseNetwork]) -> bool:
    plain = plain_address(address)
    return bool(plain) and any(ipaddress.ip_address(plain) in network for network in networks)


def _client_behind(lines: list[str], proxies: Sequence[ipaddress._BaseNetwork]) -> str:
    """The last address in `X-Forwarded-For` that is no trusted proxy: what stands before it, the client may have made up."""
    named = [plain_address(part) for line in lines for part in line.split(",")]
    for address in reversed(named):
        if not address or not is_among(address, proxies):
            return address
    return ""


def _cookies(lines: list[str]) -> tuple[tuple[str, str], ...]:
    # By hand: the standard library's parser stops at the first odd cookie, and other programs on this host set theirs too.
    pairs = (part.strip().partition("=") for line in lines for part in line.split(";"))
    return tuple((name, value.strip('"')) for name, equals, value in pairs if equals)


class _Headers:
    """The headers of a scope by name, decoded."""

    def __init__(self, scope: dict):
        self._pairs = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]

    def all(self, name: str) -> list[str]:
        return [value for key, value in self._pairs if key == name]

    def only(self, name: str) -> str | None:
        """The header that is there once; None where it is missing or there twice."""
        found = self.all(name)
        return found[0] if len(found) == 1 else None

    def first(self, name: str, *, whole: bool = False) -> str:
        """The first value of the first header, or ""."""
        found = self.all(name)
        return "" if not found else found[0].strip() if whole else found[0].split(",")[0].strip()
