"""What all tests share: a data folder of their own, marks that need a browser or a card, and no process left behind."""

from __future__ import annotations

import faulthandler
import os
import shutil
import tempfile
import uuid
from pathlib import Path

import psutil
import pytest

from backend.schema.paths import Places

SESSION = "LOFT_TEST_SESSION"  # inherited by every process that a test starts
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
LIBRARIES_OWN = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "compile_worker",
)  # end with this process
CI_SECONDS = 60 * 60
NO_BROWSER = "no Chromium found: install it (Debian: apt-get install chromium) or name it in LOFT_CHROMIUM"

_skipped = pytest.StashKey[int]()
_left = pytest.StashKey[list[str]]()
_stderr = pytest.StashKey()
_data = Path(tempfile.mkdtemp(prefix="loft-tests-"))
os.environ.update({"LOFT_DATA": str(_data), SESSION: uuid.uuid4().hex})
for _name in [name for name in os.environ if name.startswith("DIFFSYNTH_")]:
    del os.environ[_name]


def chromium_path() -> str | None:
    """The Chromium on this machine, or None."""
    named = os.environ.get("LOFT_CHROMIUM")
    return named or next((path for name in BROWSERS if (path := shutil.which(name))), None)


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a Chromium; tests that ask for it are skipped where there is none."""
    return chromium_path() or pytest.skip(NO_BROWSER)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """An empty data folder, which is also that of this process and of the children it starts."""
    root = tmp_path / "data"
    root.mkdir()
    monkeypatch.setenv("LOFT_DATA", str(root))
    return Places(root)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Where nobody watches, a test that hangs says where it hangs instead of taking the machine's whole time."""
    if os.environ.get("CI"):
        session.config.stash[_stderr] = open(os.dup(2), "w")  # noqa: PTH123, SIM115  # fd 2 is captured later on
        faulthandler.dump_traceback_later(CI_SECONDS, exit=True, file=session.config.stash[_stderr])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_browser = None if chromium_path() else pytest.mark.skip(reason=NO_BROWSER)
    skip_card = None
    if any(item.get_closest_marker("gpu") for item in items):
        from backend.system import gpu_probe

        if gpu_probe.probe()[0].device == "cpu" and "LOFT_CARD" not in os.environ:
            skip_card = pytest.mark.skip(reason="no accelerator here")
    for item in items:
        if skip_browser and item.get_closest_marker("browser"):
            item.add_marker(skip_browser)
            config.stash[_skipped] = config.stash.get(_skipped, 0) + 1
        if skip_card and item.get_closest_marker("gpu"):
            item.add_marker(skip_card)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Ends what tests have left running; that any was left fails the session."""
    left = [process for process in psutil.process_iter() if _is_ours(process)]
    _, left = psutil.wait_procs(left, timeout=3)
    found = session.config.stash.setdefault(_left, [])
    found += [_described(process) for process in left]
    for process in left:
        process.kill()
    shutil.rmtree(_data, ignore_errors=True)
    if hasattr(session.config, "workeroutput"):  # one of several processes: the one that reports is told
        session.config.workeroutput["left"] = found
    if found and exitstatus == 0:
        session.exitstatus = 1


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable(config: pytest.Config, report):
    """A report on its way between test processes: text that is no UTF-8 (names of files, outputs) would end them all."""
    return _in_utf8((yield))


def _in_utf8(value):
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_in_utf8(key): _in_utf8(one) for key, one in value.items()}
    return type(value)(map(_in_utf8, value)) if isinstance(value, list | tuple) else value


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """What one of several test processes has found left running (pytest-xdist)."""
    node.config.stash.setdefault(_left, []).extend(getattr(node, "workeroutput", {}).get("left", []))


def _is_ours(process: psutil.Process) -> bool:
    try:
        if process.pid == os.getpid() or process.environ().get(SESSION) != os.environ[SESSION]:
            return False
        return not any(word in part for part in process.cmdline() for word in LIBRARIES_OWN)
    except (psutil.Error, OSError):
        return False


def _described(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return str(process.pid)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    skipped = config.stash.get(_skipped, 0)
    if skipped:
        terminalreporter.write_line(f"{skipped} browser tests skipped: {NO_BROWSER}")
    for line in config.stash.get(_left, []):
        terminalreporter.write_line(f"A test left a process running, {line}", red=True)


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Qwen-Image of random weights."""
    from tests.tiny_models import make_qwen_image

    return make_qwen_image(tmp_path_factory.mktemp("models") / "tiny_qwen")


@pytest.fixture(scope="session")
def tiny_edit(tmp_path_factory: pytest.TempPathFactory):
    """tiny_edit(variant) -> the folder of a tiny Qwen-Image-Edit of random weights: "edit", "edit-2509" or "edit-2511"."""
    from tests.tiny_models import make_qwen_edit

    made: dict[str, Path] = {}

    def folder(variant: str) -> Path:
        if variant not in made:
            made[variant] = make_qwen_edit(tmp_path_factory.mktemp("models") / f"tiny_{variant}", variant)
        return made[variant]

    return folder
