"""Who may reach the page: the address it is bound to, and the names and passwords it asks for."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

from backend.schema.messages import Trouble


def logins(auth: str | None) -> list[tuple[str, str]]:
    """The (user, password) pairs in `--auth`: one `USER:PASSWORD`, or a file with one such line each; none for None.

    Raises Trouble("bad_auth"), which never repeats a password.
    """
    if auth is None:
        return []
    path = _file(auth)
    if path is None:
        return [_pair(auth, "--auth")]
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError):
        raise Trouble("bad_auth", f"The file {path} cannot be read as text.") from None
    pairs = [_pair(line, f"A line of {path}") for line in lines if line and not line.startswith("#")]
    if not pairs:
        raise Trouble("bad_auth", f"The file {path} holds no USER:PASSWORD line.")
    return pairs


def _file(text: str) -> Path | None:
    """The file that `text` names, if there is one."""
    try:
        path = Path(text).expanduser()
        return path if path.is_file() else None
    except (OSError, ValueError, RuntimeError):  # too long for a name, no such user's home
        return None


def _pair(text: str, where: str) -> tuple[str, str]:
    user, colon, password = text.partition(":")
    if not (user and colon and password):
        raise Trouble("bad_auth", f"{where} is not USER:PASSWORD.", hint="Or give a file that holds such lines.")
    return user, password


def is_loopback(host: str) -> bool:
    """Whether `host` can be reached from this machine alone. Raises Trouble("bad_host") for a name that is none."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        pass
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        raise Trouble("bad_host", f"--host is {host!r}, which is no address of this machine.") from None
    return all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in found)


def check(host: str, auth: str | None) -> list[tuple[str, str]]:
    """The logins for a page bound to `host`. Raises Trouble where others could reach it without a password."""
    pairs = logins(auth)
    if not pairs and not is_loopback(host):
        raise Trouble(
            "no_auth",
            f"With --host {host} everybody on the network could use this page.",
            hint="Add --auth USER:PASSWORD (or a file of such lines), or leave --host out.",
        )
    return pairs
