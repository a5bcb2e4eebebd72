"""The Python environment that Loft runs in: found, made and filled.

Standard library only, nothing of it is imported to be checked.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from backend.host.process.isolation import SAFE
from backend.schema.messages import Trouble
from backend.schema.paths import PROJECT

STAMP = "loft-requirements.sha256"
NETWORK_WORDS = ("NewConnectionError", "NameResolutionError", "ConnectTimeout", "ReadTimeout", "ProxyError", "SSLError")


def ready_python(requirements: Path, *, project: Path = PROJECT) -> str:
    """The Python that has what `requirements` pins: this one, the active virtual environment, or `.venv` in `project`.

    What is missing is made and installed. A stamp of the requirements' hash makes the next start quick; it is not
    believed alone.
    """
    if not missing(requirements):
        return sys.executable
    if in_virtual_environment():
        prefix, python = Path(sys.prefix), sys.executable
    else:
        prefix = project / ".venv"
        python = str(python_in(prefix))
        make_virtual_environment(prefix)
    stamp, wanted = prefix / STAMP, fingerprint(requirements)
    known = stamp.read_text().split() if stamp.is_file() else []
    if not set(wanted) <= set(known) or missing(requirements, packages_in(prefix)):
        install(python, requirements, log=prefix / "loft-install.log")
        stamp.write_text("\n".join(wanted))
        say_if_card_is_left_out(python, packages_in(prefix))
    return python


def in_virtual_environment() -> bool:
    conda = (Path(sys.prefix) / "conda-meta").is_dir() and os.environ.get("CONDA_DEFAULT_ENV", "base") != "base"
    return sys.prefix != sys.base_prefix or conda


def pins(requirements: Path) -> list[tuple[str, str]]:
    """(name, version) of every `name==version` line; lines of other forms are left to pip."""
    found = []
    for line in requirements.read_text(encoding="utf-8").splitlines():
        line = line.split("#")[0].strip()
        if line.startswith("-r "):
            found += pins(requirements.parent / line[3:].strip())
        elif "==" in line and ";" not in line:
            name, version = line.split("==")
            found.append((name.split("[")[0].strip(), version.strip()))
    return found


def missing(requirements: Path, path: list[str] | None = None) -> list[str]:
    """Pins that the packages under `path` (by default this interpreter's) do not satisfy. Nothing is imported."""
    path = sys.path if path is None else path
    return [f"{name}=={version}" for name, version in pins(requirements) if version_of(name, path) != version]


def version_of(name: str, path: list[str]) -> str | None:
    """The installed version without its local part: torch 2.13.0+cpu is 2.13.0."""
    found = next(iter(importlib.metadata.distributions(name=name, path=path)), None)
    return found.version.split("+")[0] if found else None


def fingerprint(requirements: Path) -> list[str]:
    """The hash of each of the requirement files that `requirements` consists of."""
    text = requirements.read_bytes()
    lines = [line.split() for line in text.decode("utf-8").splitlines() if line.startswith("-r ")]
    parts = [fingerprint(requirements.parent / line[1]) for line in lines]
    return [*(item for part in parts for item in part), hashlib.sha256(text).hexdigest()]


def python_in(prefix: Path) -> Path:
    return prefix / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def packages_in(prefix: Path) -> list[str]:
    pattern = "Lib/site-packages" if os.name == "nt" else "lib/python*/site-packages"
    return [str(folder) for folder in prefix.glob(pattern)]


def make_virtual_environment(prefix: Path) -> None:
    """Makes `prefix` unless it is a working environment; one that is broken (its Python is gone) is made anew."""
    if python_in(prefix).exists():
        return
    if prefix.exists() and any(prefix.iterdir()) and not (prefix / "pyvenv.cfg").exists():
        raise Trouble(
            "bad_folder", f"{prefix} is there but is no virtual environment.", hint="Rename it and start again."
        )
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        raise Trouble(
            "no_venv",
            f"This Python ({sys.executable}) comes without venv and pip.",
            hint="On Debian and Ubuntu: apt install python3-venv. Elsewhere install Python from python.org.",
        )
    import venv

    print(f"Making a virtual environment in {prefix} ...", flush=True)
    try:
        venv.EnvBuilder(with_pip=True, clear=prefix.exists(), symlinks=os.name != "nt").create(prefix)
    except (OSError, subprocess.CalledProcessError) as error:
        shutil.rmtree(prefix, ignore_errors=True)
        raise Trouble("no_venv", f"The virtual environment {prefix} could not be made: {error}.") from None


def install(python: str, requirements: Path, *, log: Path) -> None:
    """Installs with pip, which shows its progress. Raises Trouble that says why it failed."""
    if subprocess.run([python, *SAFE, "-m", "pip", "--version"], capture_output=True).returncode != 0:
        subprocess.run([python, *SAFE, "-m", "ensurepip"], capture_output=True)
    print(f"Installing what {requirements.name} lists into {log.parent} (the first time takes minutes) ...", flush=True)
    log.unlink(missing_ok=True)
    pip = [python, *SAFE, "-m", "pip", "--disable-pip-version-check", "--no-input", "--log", str(log)]
    if subprocess.run([*pip, "install", "-r", str(requirements)]).returncode != 0:
        said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        raise Trouble("not_installed", why_pip_failed(said, python), hint="Start again to go on where it stopped.")


def why_pip_failed(said: str, python: str) -> str:
    """One sentence from what pip has written."""
    if "No module named pip" in said or not said:
        return f"{python} has no working pip."
    if any(word in said for word in NETWORK_WORDS):
        return "The packages could not be downloaded: the network or the package index did not answer."
    if "No space left" in said or "Errno 28" in said:
        return "The packages could not be installed: the disk is full (about 8 GB are needed with CUDA, 2 GB without)."
    for line in reversed(said.splitlines()):
        if "No matching distribution found for" in line:
            what = line.split("found for")[1].split("(from")[0].strip()
            return f"There is no {what} for Python {sys.version_info[0]}.{sys.version_info[1]} on this system."
    return "The packages could not be installed; pip's own words are above."


def say_if_card_is_left_out(python: str, path: list[str]) -> None:
    """On Windows the plain torch computes on the CPU, whatever card there is."""
    torch = next(iter(importlib.metadata.distributions(name="torch", path=path)), None)
    if os.name == "nt" and shutil.which("nvidia-smi") and torch and "+cu" not in torch.version:
        print(
            f"This machine has an NVIDIA card, but torch {torch.version} computes on the CPU. To use the card, "
            "install torch "
            f"{torch.version.split('+')[0]} for CUDA into {python} as pytorch.org tells for Windows, and start again."
        )
