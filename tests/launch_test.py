"""The one command: what it needs, the environment it makes, and that nothing outlives it."""

from __future__ import annotations

import ast
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import psutil
import pytest

import launch
from backend.host.process import data_folder_lock, environment
from backend.host.runs import runs
from backend.schema import login
from backend.schema.messages import Trouble
from backend.schema.paths import PROJECT, Places
from backend.schema.settings import from_values
from backend.schema.training.config import TrainingConfig
from backend.system import process_record
from tests.waiting import wait_for

WINDOWS = sys.platform == "win32"
LAUNCH = str(PROJECT / "launch.py")


def run_launch(*words: str, **more) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, LAUNCH, *words], capture_output=True, text=True, timeout=60, **more)


# What it refuses, each in one sentence


def test_an_older_python_can_read_it_and_is_told_what_is_needed(monkeypatch):
    ast.parse(Path(LAUNCH).read_text(encoding="utf-8"), feature_version=(3, 7))
    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    with pytest.raises(SystemExit, match=r"Loft needs Python 3\.11 or newer; this is Python 3\.9\."):
        runpy.run_path(LAUNCH, run_name="__main__")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "With --host 0.0.0.0 everybody on the network could use this page. Add --auth"),
        (["--host", "::"], "With --host :: everybody"),
        (["--auth", "nobody"], "--auth is not USER:PASSWORD."),
        (["--auth", "user:"], "--auth is not USER:PASSWORD."),
        (["--port", "70000"], "--port is 70000; it must be from 0 to 65535."),
        (["--host", "no.such.host.invalid"], "--host is 'no.such.host.invalid', which is no address of this machine."),
        (["--host", "203.0.113.7", "--auth", "a:b"], "--host is '203.0.113.7', which is no address of this machine."),
        (
            ["--allow-host", "http://box"],
            "--allow-host is 'http://box'; it must be a name or an address, without a port.",
        ),
        (["--trusted-proxy", "box"], "--trusted-proxy is box; it must be an IP address or a network."),
        (["--no-browser", "--test"], "--no-browser cannot stand before --test"),
    ],
)
def test_what_cannot_be_is_refused(words, said, tmp_path):
    done = run_launch(*words, env={**os.environ, "LOFT_DATA": str(tmp_path)})
    assert done.returncode == 2
    assert said in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_a_data_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    done = run_launch("--data", str(tmp_path / "file" / "data"))
    assert done.returncode == 2 and "cannot be made" in done.stderr and "Traceback" not in done.stderr


def test_logins_from_a_file_and_from_words(tmp_path):
    file = tmp_path / "logins"
    file.write_text("# who may\n\nanna:s:ecret \nben: pw\n", encoding="utf-8")
    assert login.logins(str(file)) == [("anna", "s:ecret"), ("ben", " pw")]
    assert login.logins("anna:" + "x" * 5000) == [("anna", "x" * 5000)]
    assert login.logins("~nobody-here:pw") == [("~nobody-here", "pw")]
    assert login.logins("anna:s:ecret") == [("anna", "s:ecret")]
    assert login.logins(None) == []
    file.write_text("# nobody\n")
    with pytest.raises(Trouble, match="holds no USER:PASSWORD line"):
        login.logins(str(file))
    file.write_bytes(b"anna:p\xff\n")
    with pytest.raises(Trouble, match="cannot be read as text"):
        login.logins(str(file))
    file.write_text("hunter2\n")
    with pytest.raises(Trouble) as caught:
        login.logins(str(file))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "alone"), [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True)]
)
def test_loopback(host, alone):
    assert login.is_loopback(host) is alone
    assert login.check(launch.flags(["--host", host])) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5"])
def test_others_need_a_login(host):
    assert not login.is_loopback(host)
    with pytest.raises(Trouble, match="Add --auth"):
        login.check(launch.flags(["--host", host]))
    assert login.check(launch.flags(["--host", host, "--auth", "anna:pw"])) == [("anna", "pw")]
    with pytest.raises(Trouble, match="--no-token is for this machine alone"):
        login.check(launch.flags(["--host", host, "--auth", "anna:pw", "--no-token"]))


# Ports and addresses


def test_the_next_free_port_is_taken_and_said(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = launch.free_port("127.0.0.1", port)
        assert port < found < port + 100
        assert f"Port {port} is taken; using port {found}." in capsys.readouterr().out
    assert launch.free_port("127.0.0.1", port) == port
    assert launch.free_port("127.0.0.1", 0) > 0
    assert capsys.readouterr().out == ""


def test_a_port_that_another_took_on_every_address_counts_as_taken():
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        assert launch.free_port("127.0.0.1", taken.getsockname()[1]) != taken.getsockname()[1]


def test_addresses_as_this_machine_reaches_them():
    assert [login.reachable(host) for host in ("127.0.0.1", "0.0.0.0", "::", "::1", "box")] == [
        "127.0.0.1",
        "127.0.0.1",
        "[::1]",
        "[::1]",
        "box",
    ]


# The environment


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Path:
    """A folder with wheels of tiny packages, and a project whose environment is made once, since that takes seconds."""
    folder = tmp_path_factory.mktemp("machine")
    for name, version in (("loft-tiny", "1.0"), ("loft-tiny", "2.0"), ("loft-tiny-more", "1.0")):
        wheel(folder / "wheels", name, version)
    (folder / "project").mkdir()
    return folder


@pytest.fixture
def project(machine: Path) -> Path:
    """The project with its requirements as they are at first."""
    folder = machine / "project"
    (folder / "requirements.txt").write_text("loft-tiny==1.0\n")
    (folder / "requirements-dev.txt").write_text("-r requirements.txt\nloft-tiny-more==1.0  # a comment\n")
    return folder


def wheel(folder: Path, name: str, version: str) -> None:
    """The smallest package that pip installs."""
    folder.mkdir(exist_ok=True)
    module, facts = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{module}.py", f"VERSION = {version!r}\n")
        file.writestr(f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{facts}/RECORD", "")


def make_ready(project: Path, *, requirements: str = "requirements.txt", **pip: str) -> subprocess.CompletedProcess:
    """`ready_python` under a Python that is in no virtual environment, as a user's is."""
    base = environment.python_in(Path(sys.base_prefix)) if not WINDOWS else Path(sys.base_prefix) / "python.exe"
    script = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(PROJECT)!r})
from backend.host.process import environment
from backend.schema.messages import Trouble
try:
    print(environment.ready_python(Path({str(project / requirements)!r}), project=Path({str(project)!r})))
except Trouble as trouble:
    sys.exit(f"{{trouble.kind}}: {{trouble}}")
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(project.parent / "wheels"), "PIP_NO_INDEX": "1", **pip}
    return subprocess.run([str(base), "-c", script], env=env, capture_output=True, text=True, timeout=120)


def version_in(python: str) -> str:
    script = "import loft_tiny; print(loft_tiny.VERSION)"
    return subprocess.run([python, "-c", script], capture_output=True, text=True, timeout=30).stdout.strip()


def test_a_fresh_machine_gets_an_environment_and_the_second_start_none(project):
    first = make_ready(project)
    assert first.returncode == 0, first.stderr
    python = first.stdout.splitlines()[-1]
    assert Path(python) == environment.python_in(project / ".venv") and version_in(python) == "1.0"
    assert "Making a virtual environment" in first.stdout and "Installing what requirements.txt lists" in first.stdout
    assert "Successfully installed loft-tiny-1.0" in first.stdout  # pip's own words are shown

    second = make_ready(project)
    assert second.stdout.strip() == python  # nothing is said, since nothing is done

    dev = make_ready(project, requirements="requirements-dev.txt")
    assert "Successfully installed loft-tiny-more-1.0" in dev.stdout
    for name in ("requirements.txt", "requirements-dev.txt"):
        assert make_ready(project, requirements=name).stdout.strip() == python

    (project / "requirements.txt").write_text("loft-tiny==2.0\n")
    third = make_ready(project)
    assert third.returncode == 0 and version_in(python) == "2.0" and "Making" not in third.stdout

    for facts in Path(environment.packages_in(project / ".venv")[0]).glob("loft_tiny-*.dist-info"):
        shutil.rmtree(facts)
    assert "Installing" in make_ready(project).stdout  # the stamp alone is not believed


def test_a_package_that_does_not_exist_is_named(project):
    (project / "requirements.txt").write_text("loft-tiny==9.9\n")
    done = make_ready(project)
    assert done.returncode == 1
    assert "not_installed: There is no loft-tiny==9.9 for Python 3." in done.stderr
    (project / "requirements.txt").write_text("loft-tiny==1.0\n")
    again = make_ready(project)
    assert again.returncode == 0 and "Making" not in again.stdout


def test_without_a_network_it_says_so(project):
    (project / "requirements.txt").write_text("loft-absent==1.0\n")
    with socket.socket() as closed:  # a port where nothing listens
        closed.bind(("127.0.0.1", 0))
        index = f"http://127.0.0.1:{closed.getsockname()[1]}/simple"
        done = make_ready(project, PIP_NO_INDEX="0", PIP_FIND_LINKS="", PIP_INDEX_URL=index, PIP_RETRIES="0")
    assert done.returncode == 1
    assert "could not be downloaded: the network or the package index did not answer" in done.stderr


def test_a_broken_environment_is_made_anew_but_a_strangers_folder_is_left(project, tmp_path):
    prefix = tmp_path / ".venv"
    prefix.mkdir()
    (prefix / "notes.txt").write_text("mine")
    with pytest.raises(Trouble, match="is no virtual environment"):
        environment.make_virtual_environment(prefix)
    assert (prefix / "notes.txt").read_text() == "mine"
    (prefix / "pyvenv.cfg").write_text("home = /gone\n")
    environment.make_virtual_environment(prefix)
    assert subprocess.run([environment.python_in(prefix), "-m", "pip", "--version"], timeout=60).returncode == 0
    assert not (prefix / "notes.txt").exists()


def test_the_running_interpreter_is_used_as_it_is_where_it_has_everything():
    assert environment.missing(PROJECT / "requirements-dev.txt") == []
    assert environment.ready_python(PROJECT / "requirements-dev.txt") == sys.executable


def test_pins_and_versions(tmp_path):
    (tmp_path / "more.txt").write_text("torch==2.13.0\n")
    (tmp_path / "r.txt").write_text("# words\n-r more.txt\na[extra]==1.0\nb==2 ; sys_platform == 'win32'\nc>=3\n\n")
    assert environment.pins(tmp_path / "r.txt") == [("torch", "2.13.0"), ("a", "1.0")]
    facts = tmp_path / "torch-2.13.0+cpu.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n")
    assert environment.missing(tmp_path / "r.txt", [str(tmp_path)]) == ["a==1.0"]


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("", "has no working pip"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "the disk is full"),
        ("WARNING: NewConnectionError(...)\nERROR: No matching distribution found for torch==2.13.0", "network"),
        ("ERROR: No matching distribution found for torch==2.13.0 (from x)", "There is no torch==2.13.0 for Python"),
        ("ERROR: something else", "pip's own words are above"),
    ],
)
def test_why_an_installation_failed(said, sentence):
    assert sentence in environment.why_pip_failed(said, "python")


# From the first line to the last process


class Launched:
    """A studio started by launch.py on a data folder of its own."""

    def __init__(self, data: Path, *words: str):
        self.data, self.lines = data, data.parent / "launch.txt"
        argv = [sys.executable, LAUNCH, "--no-browser", "--data", str(data), "--port", "0", *words]
        env = {name: value for name, value in os.environ.items() if name != "LOFT_DATA"}
        with self.lines.open("w") as out:
            apart = {} if WINDOWS else {"start_new_session": True}
            self.child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, **apart)
        self.began = time.monotonic()

    def said(self) -> str:
        return self.lines.read_text()

    def address(self) -> str:
        """Waits for the line that says that the page answers."""
        while "Loft is at " not in self.said():
            assert self.child.poll() is None and time.monotonic() - self.began < 240, self.said()
            time.sleep(0.02)
        return self.said().split("Loft is at ")[1].split()[0]

    def processes(self) -> list[psutil.Process]:
        """Everything that works on the data folder."""
        return [found for found in psutil.process_iter() if _data_of(found) == str(self.data)]

    def wait(self, seconds: float = 120.0) -> int:
        return self.child.wait(timeout=seconds)


def _data_of(process: psutil.Process) -> str | None:
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else process.environ().get("LOFT_DATA")
    except (psutil.Error, OSError):
        return None


@pytest.fixture
def launched(tmp_path: Path):
    all_launched = []

    def start(*words: str) -> Launched:
        data = tmp_path / "data"
        data.mkdir(exist_ok=True)
        all_launched.append(Launched(data, *words))
        return all_launched[-1]

    yield start
    for each in all_launched:
        if each.child.poll() is None:
            each.child.kill()
            each.child.wait()
        for process in each.processes():
            process.kill()


def browser() -> urllib.request.OpenerDirector:
    """Keeps cookies, as a browser does."""
    return urllib.request.build_opener(urllib.request.HTTPCookieProcessor())


SLEEPING = [sys.executable, "-c", "import time; time.sleep(300)"]


def start_run(data: Path) -> Path:
    """A run as the page starts one; deaf to the stop file, so that it must be ended."""
    folder = runs.create(from_values(TrainingConfig, {"name": "sleeper"}), Places(data))
    runs.start(folder, places=Places(data), argv=SLEEPING)
    return folder


def test_the_page_answers_and_ctrl_c_ends_everything(launched):
    studio = launched()
    address = studio.address()
    seconds, work = time.monotonic() - studio.began, sum(sum(found.cpu_times()[:2]) for found in studio.processes())
    with browser().open(address, timeout=10) as answer:
        assert answer.status == 200 and b"Loft" in answer.read()
        assert "token" not in answer.url, "the token is dropped from the address"
    print(f"from launch to a page that answers: {seconds:.1f} s, of which the processor worked {work:.1f} s")
    assert work < 6, "on an idle machine the page answers within 6 s; here others may be at work"
    folder = start_run(studio.data)
    assert len(studio.processes()) >= 2
    studio.child.send_signal(signal.SIGINT)
    wait_for(lambda: "Asking 1 training run to save and end" in studio.said(), 60)
    studio.child.send_signal(signal.SIGINT)  # it does not listen: do not wait
    assert studio.wait() == 0
    assert studio.processes() == []
    assert runs.read(folder).status == "stopped"
    assert "Traceback" not in studio.said()


def test_before_the_login_the_page_tells_nothing(launched):
    studio = launched("--auth", "anna:s:ecret-pw")
    address = studio.address()
    for path in ("", "config"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(address + path, timeout=30)
        page = refused.value.read().decode()
        assert refused.value.code == 401 and "Log in to Loft" in page
        assert str(PROJECT) not in page and "Negative prompt" not in page
    anna = browser()
    with anna.open(f"{address}login", data=b"username=anna&password=s%3Aecret-pw", timeout=30) as answer:
        assert answer.status == 200
    with anna.open(f"{address}config", timeout=30) as answer:
        assert answer.status == 200
    # What the launcher started was told the password by a pipe.
    for process in studio.processes():
        if process.pid != studio.child.pid:
            assert not any("ecret-pw" in word for word in (*process.cmdline(), *process.environ().values()))
    for path in studio.data.rglob("*"):
        assert not path.is_file() or b"ecret-pw" not in path.read_bytes()


@pytest.mark.skipif(WINDOWS, reason="POSIX signals")
@pytest.mark.parametrize("name", ["SIGHUP", "SIGKILL"])
def test_however_the_launcher_ends_the_studio_ends_too(launched, name):
    """SIGHUP is a closed terminal; SIGKILL is what no program can answer: the end of the studio's stdin does."""
    studio = launched()
    studio.address()
    studio.child.send_signal(getattr(signal, name))
    studio.wait()
    wait_for(lambda: studio.processes() == [])


def test_a_studio_that_does_not_end_is_ended_with_its_run(launched):
    studio = launched()
    studio.address()
    folder = start_run(studio.data)
    page = next(found for found in studio.processes() if "studio.app" in found.cmdline())
    page.suspend()
    for _ in range(3):
        studio.child.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert studio.wait() == 0
    assert studio.processes() == []
    assert runs.read(folder).status == "stopped"


def test_a_killed_studio_leaves_its_run_and_the_next_one_ends_it(launched):
    studio = launched()
    studio.address()
    folder = start_run(studio.data)
    next(found for found in studio.processes() if "studio.app" in found.cmdline()).kill()
    assert studio.wait() != 0
    assert "The studio ended by itself" in studio.said()
    run = runs.read(folder)
    assert run.live and process_record.alive(run.process)
    again = launched()
    again.address()
    assert runs.read(folder).live
    again.child.send_signal(signal.SIGTERM)
    wait_for(lambda: "Asking 1 training run to save and end" in again.said(), 60)
    again.child.send_signal(signal.SIGTERM)
    assert again.wait() == 0
    assert again.processes() == [] and runs.read(folder).status == "stopped"


def test_a_second_studio_on_the_same_data_is_refused(launched, tmp_path):
    (tmp_path / "data").mkdir()
    data_folder_lock.claim(Places(tmp_path / "data"), port=7999)  # this very process plays the first
    studio = launched()
    assert studio.wait() == 2
    assert "Loft is open already on" in studio.said() and "port 7999" in studio.said()
    assert "The studio could not start (exit code 2); what it said is above." in studio.said()
    assert "Traceback" not in studio.said()
