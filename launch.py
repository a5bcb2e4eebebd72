"""Starts Loft: makes its environment, installs what is missing, opens the page, and ends everything at Ctrl-C.

    python launch.py                      the studio on http://127.0.0.1:7860
    python launch.py --test [ARGUMENTS]   ruff, then pytest with the arguments

Standard library only, and written so that an older Python can read it and say what it needs.
"""

from __future__ import annotations

import sys

NEEDED_PYTHON = (3, 11)
if sys.version_info < NEEDED_PYTHON:
    sys.exit("Loft needs Python 3.11 or newer; this is Python {}.{}.".format(*sys.version_info[:2]))

# What lies beside this file is no module but for Loft's own packages: behind the standard library it stands for nothing
# else.
if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))

import argparse
import contextlib
import errno
import http.client
import os
import signal
import socket
import subprocess
import threading
import time
import webbrowser
from pathlib import Path

from backend.host.access_token import ticket, token
from backend.host.process.environment import ready_python
from backend.host.process.isolation import SAFE, isolated
from backend.schema import login
from backend.schema.messages import Trouble
from backend.schema.paths import Places
from backend.schema.untrusted import expanded

ROOT = Path(__file__).resolve().parent
MOST_TEST_PROCESSES = 4  # each has torch in memory
PORTS_TRIED = 100
GRACE_SECONDS = 45.0  # for runs that save at Ctrl-C, and for the worker
HURRIED_SECONDS = 10.0


def main(argv: list[str]) -> int:
    try:
        if "--test" in argv:
            at = argv.index("--test")
            if argv[:at]:
                raise Trouble("bad_flags", f"{argv[0]} cannot stand before --test; what follows it goes to pytest.")
            return run_tests(ready_python(ROOT / "requirements-dev.txt"), argv[at + 1 :])
        return serve(flags(argv))
    except Trouble as trouble:
        print(trouble, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130


def flags(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python launch.py", description="Starts Loft's page.", allow_abbrev=False)
    login.add_flags(parser)
    parser.add_argument("--port", type=int, default=7860, help="the next free one is taken if it is not free [7860]")
    parser.add_argument(
        "--data", metavar="DIR", help="folder for models, LoRAs, runs and pictures [LOFT_DATA, or here]"
    )
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser")
    parser.add_argument("--test", action="store_true", help="run ruff and pytest instead; what follows goes to pytest")
    return parser.parse_args(argv)


# The tests


def run_tests(python: str, arguments: list[str]) -> int:
    """ruff, then pytest even where ruff found something; the first exit code that is not 0. Without arguments pytest
    runs twice: by several processes all but the browser's tests, which then have the machine for themselves."""
    processors = os.cpu_count() or 1
    several = str(min(processors, MOST_TEST_PROCESSES))
    env = isolated(os.environ, data=ROOT)
    whole = [["pytest", "-n", several, "-m", "not browser"], ["pytest", "-m", "browser"]]
    codes = []
    for words in (["ruff", "check", "."], *([["pytest", *arguments]] if arguments else whole)):
        print("$ python -m", *words, flush=True)
        threads = {"OMP_NUM_THREADS": str(max(1, processors // int(several)))} if "-n" in words else {}
        child = subprocess.run([python, *SAFE, "-m", *words], cwd=ROOT, env={**threads, **env})
        codes.append(child.returncode)
    return next((code for code in codes if code), 0)


# The studio


def serve(options: argparse.Namespace) -> int:
    """Starts the studio and stays with it until it ends or is asked to; nothing that was started is left behind."""
    logins = login.check(options)
    data = expanded(options.data or os.environ.get("LOFT_DATA") or ROOT).resolve()
    try:
        data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Trouble("bad_folder", f"The data folder {data} cannot be made: {error.strerror}.") from None
    python = ready_python(ROOT / "requirements.txt")
    port = free_port(options.host, options.port)
    words = [*login.flags_for_studio(options), "--port", str(port), "--data", str(data)]
    words += ["--auth-from-stdin"] if logins else []
    secret = "" if options.no_token else token(Places(data))
    shown = "" if logins else secret
    asked = Asked()
    child = start_studio([python, *SAFE, "-m", "studio.app", *words], data, logins)
    answered = threading.Event()
    threading.Thread(target=greet, args=(child, options, port, shown, answered), daemon=True).start()
    code = watch(child, asked)
    if asked.count:
        return sweep(python, data)
    if answered.is_set():
        say = "The studio ended by itself (exit code {}). Training runs go on: start again to see them."
    else:
        say = "The studio could not start (exit code {}); what it said is above."
    print(say.format(code), file=sys.stderr)
    return code if code > 0 else 1


class Asked:
    """Counts how often the user asked to end: Ctrl-C, SIGTERM, a closed terminal."""

    def __init__(self):
        self.count = 0
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), self)

    def __call__(self, *_):
        self.count += 1


def start_studio(argv: list[str], data: Path, logins: list[tuple[str, str]]) -> subprocess.Popen:
    """In a session of its own, so that Ctrl-C comes here alone. The end of its stdin, however it comes about, asks it
    to end.

    Logins go there too, as its first line.
    """
    env = {**isolated(os.environ, data=data), "LOFT_SUPERVISED": "1", "LOFT_DATA": str(data), "PYTHONUTF8": "1"}
    apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP} if os.name == "nt" else {"start_new_session": True}
    child = subprocess.Popen(argv, cwd=ROOT, env=env, stdin=subprocess.PIPE, **apart)
    if logins:
        with contextlib.suppress(OSError):  # it is gone already, and `watch` says so
            child.stdin.write(login.logins_line(logins))
            child.stdin.flush()
    return child


def watch(child: subprocess.Popen, asked: Asked) -> int:
    """Waits for the studio's end and hands every wish to end on to it; ends it by force when it does not come to an
    end."""
    told, end = 0, float("inf")
    while True:
        try:
            return child.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            pass
        while told < asked.count:
            told += 1
            end = time.monotonic() + (GRACE_SECONDS if told == 1 else HURRIED_SECONDS if told == 2 else 0)
            tell(child)
        if time.monotonic() > end:
            kill(child)


def tell(child: subprocess.Popen) -> None:
    with contextlib.suppress(OSError):  # it may be going already
        child.stdin.write(b"\n")
        child.stdin.flush()


def kill(child: subprocess.Popen) -> None:
    with contextlib.suppress(OSError):  # it may be gone already
        child.kill() if os.name == "nt" else os.killpg(child.pid, signal.SIGKILL)


def sweep(python: str, data: Path) -> int:
    """Ends a worker or runs that the studio could not end itself. Returns 1 where it cannot either, else 0."""
    argv = [python, *SAFE, "-m", "backend.host.shutdown", str(data)]
    done = subprocess.run(argv, cwd=ROOT, env=isolated(os.environ, data=data), stdin=subprocess.DEVNULL)
    return 1 if done.returncode else 0


def greet(
    child: subprocess.Popen, options: argparse.Namespace, port: int, secret: str, answered: threading.Event
) -> None:
    """Once the page answers: prints its address, with the token, and opens the browser.

    The browser gets an address that opens the page once: what it is started with can be seen in the list of processes.
    """
    while not answers(login.reachable(options.host).strip("[]"), port):
        if child.poll() is not None:
            return
        time.sleep(0.1)
    answered.set()
    behind = f", for the proxy that serves it under {options.root_path}" if options.root_path else ""
    print(f"\nLoft is at {login.address(options.host, port, secret)}{behind}   (Ctrl-C ends it)\n", flush=True)
    if not options.no_browser and not behind and has_screen():
        webbrowser.open(login.address(options.host, port, secret and ticket(secret)))


def answers(host: str, port: int) -> bool:
    """Whether a page is served there."""
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status < 500
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def has_screen() -> bool:
    """Without one, `webbrowser` would start a text browser in this very terminal."""
    return os.name == "nt" or sys.platform == "darwin" or any(os.environ.get(n) for n in ("DISPLAY", "WAYLAND_DISPLAY"))


def free_port(host: str, port: int) -> int:
    """`port`, or the next free one, which is said. Raises Trouble where the host is not this machine's or none is
    free."""
    if not 0 <= port < 65536:
        raise Trouble("bad_port", f"--port is {port}; it must be from 0 to 65535.")
    for candidate in range(port, min(port + PORTS_TRIED, 65536)):
        found = bound_port(host, candidate)
        if found:
            if found != port and port:
                print(f"Port {port} is taken; using port {found}.", flush=True)
            return found
    raise Trouble(
        "no_port", f"Every port from {port} to {port + PORTS_TRIED - 1} is taken.", hint="Choose another --port."
    )


def bound_port(host: str, port: int) -> int:
    """The port that a bind to `port` got (0 asks for any), or 0 where it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        if os.name != "nt":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
            return probe.getsockname()[1]
        except PermissionError:
            raise Trouble(
                "bad_port", f"Port {port} may not be used by this user.", hint="Choose one from 1024."
            ) from None
        except socket.gaierror:
            raise Trouble("bad_host", f"--host is {host!r}, which is no address of this machine.") from None
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise Trouble("bad_host", f"--host is {host!r}, which is no address of this machine.") from None
            return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
