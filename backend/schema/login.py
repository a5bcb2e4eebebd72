"""Who may reach the page: the address it is bound to, the names it goes by, and the names and passwords it asks for."""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from backend.schema.messages import Trouble
from backend.schema.untrusted import expanded, is_file

HOST_NAME = re.compile(r"[A-Za-z0-9._:-]{1,253}")


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
    path = expanded(text)
    return path if is_file(path) else None


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
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        raise Trouble("bad_host", f"--host is {host!r}, which is no address of this machine.") from None
    return all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in found)


def check(flags: argparse.Namespace, handed: list[tuple[str, str]] | None = None) -> list[tuple[str, str]]:
    """The logins for a page started with these flags (`handed`: those that came by another way).

    Raises Trouble where others could reach the page without a password, or a name or an address is none.
    """
    pairs = logins(flags.auth) if handed is None else handed
    alone = is_loopback(flags.host)
    if flags.no_token and not alone:
        raise Trouble(
            "no_token",
            f"--no-token is for this machine alone, and with --host {flags.host} others reach the page.",
            hint="Leave one of the two out.",
        )
    if not pairs and not alone:
        raise Trouble(
            "no_auth",
            f"With --host {flags.host} everybody on the network could use this page.",
            hint="Add --auth USER:PASSWORD (or a file of such lines), or leave --host out.",
        )
    for name in flags.allow_host:
        if not HOST_NAME.fullmatch(name.strip("[]")):
            raise Trouble("bad_host", f"--allow-host is {name!r}; it must be a name or an address, without a port.")
    networks(flags.trusted_proxy)
    return pairs


def networks(addresses: Sequence[str]) -> tuple:
    """The networks that `--trusted-proxy` names, one address or 10.0.0.0/8. Raises Trouble("bad_proxy")."""
    try:
        return tuple(ipaddress.ip_network(address.strip("[]"), strict=False) for address in addresses)
    except ValueError:
        said = ", ".join(addresses)
        raise Trouble("bad_proxy", f"--trusted-proxy is {said}; it must be an IP address or a network.") from None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say who may reach the page: of the launcher and of the studio alike."""
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to bind to; any but this machine's own needs --auth"
    )
    parser.add_argument("--auth", metavar="USER:PASSWORD", help="ask for this login; or a file with one such line each")
    parser.add_argument(
        "--no-token", action="store_true", help="let every program and user of this machine in, without the token"
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a further name under which the page is opened; may be given several times",
    )
    parser.add_argument(
        "--root-path", default="", metavar="PATH", help="path of the page behind a proxy, such as /loft"
    )
    parser.add_argument(
        "--trusted-proxy",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="a proxy whose X-Forwarded-* headers count; may be given several times",
    )


def flags_for_studio(flags: argparse.Namespace) -> list[str]:
    """The same flags again, for the process that serves the page. Passwords are not among them: see `logins_line`."""
    words = ["--host", flags.host]
    words += ["--root-path", flags.root_path] if flags.root_path else []
    words += ["--no-token"] if flags.no_token else []
    words += [word for name in flags.allow_host for word in ("--allow-host", name)]
    return words + [word for name in flags.trusted_proxy for word in ("--trusted-proxy", name)]


def logins_line(pairs: Sequence[tuple[str, str]]) -> bytes:
    """The logins as the line by which they are handed to a child's stdin: arguments and environments can be looked
    at."""
    return json.dumps(list(pairs)).encode("ascii") + b"\n"


def logins_from_stdin() -> list[tuple[str, str]]:
    """What `logins_line` handed over; not a byte more is taken from stdin. Raises Trouble("bad_auth")."""
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(0, 1)
        if not more:
            break
        line += more
    try:
        return [(str(user), str(password)) for user, password in json.loads(line)]
    except (ValueError, TypeError):
        raise Trouble("bad_auth", "No logins came by stdin.") from None


def address(host: str, port: int, token: str = "") -> str:
    """Where this machine's browser finds a page that is bound to `host`."""
    query = f"?token={token}" if token else ""
    return f"http://{reachable(host)}:{port}/{query}"


def reachable(host: str) -> str:
    """The address under which this machine reaches a server bound to `host`, as it stands in a URL."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
