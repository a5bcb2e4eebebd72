"""The way from a file that is sent to code that runs, link by link against a real studio: an upload, the form, a run's settings, Start, the process.

Each link is tried as if those before it had given way.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.host.process import processes
from backend.schema.paths import PROJECT
from tests.browser.conftest import Site
from tests.security.page_by_hand import PageCalls
from tests.security.requests_by_hand import ask, form_of

pytestmark = pytest.mark.torch

DATASET = PROJECT / "assets" / "datasets" / "character"
TRAIN = """
import sys
from backend.training.__main__ import main
for folder in sys.argv[1:]:
    print("ended with", main([folder]))
"""
CODE = "from pathlib import Path\nPath({mark!r}).write_text('it was run')\nclass X: pass\n"


class Evil:
    """Unpickled, it writes the mark."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return Path.write_text, (self.mark, "it was run")


@pytest.fixture(scope="module")
def studio(tmp_path_factory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("chain"), "--fake")
    yield made
    made.stop()


def _send(site: Site, *files: tuple[str, bytes], **headers: str):
    body, kind = form_of(*files)
    return ask(site.port, "/gradio_api/upload", method="POST", body=body, Content_Type=kind, **headers)


def _kept_like_a_module(site: Site, code: str, headers: dict) -> Path:
    """Where the code is kept once it was sent, in a folder whose name, a hash of what was sent, may stand in a dotted name."""
    for number in range(100):
        (path,) = json.loads(_send(site, ("evil.py", f"{code}# {number}".encode()), **headers).body)
        if Path(path).parent.name.isidentifier():
            return Path(path)
    raise AssertionError("every hash begins with a digit")


def _settings(site: Site, **values: object) -> Path:
    """A run's folder with these settings, as if the form and Start had let them through."""
    folder = site.places.runs / f"2026-01-01_00-00-00_{len(list(site.places.runs.glob('*')))}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def _child(site: Site, *words: str) -> subprocess.CompletedProcess:
    """What a run's process does: Python as the studio starts it, in the data folder."""
    env = processes.child_environment(site.places.root)
    argv = [*processes.PYTHON, *words]
    return subprocess.run(argv, cwd=site.places.root, env=env, capture_output=True, text=True, timeout=200)


def test_from_an_upload_to_a_run_every_link_refuses(studio, tmp_path):
    mark = tmp_path / "mark"
    code, pickled = CODE.format(mark=str(mark)), pickle.dumps(Evil(mark))
    page = PageCalls(studio)
    start, resume = page.function("train-start", "click"), page.function("run-resume", "click")
    before = set(studio.places.runs.glob("*"))

    def nothing_ran(*kept: Path) -> None:
        assert not mark.exists()
        assert set(studio.places.runs.glob("*")) == before | set(kept), "no run was made"

    # 1. The upload: nobody but who has the token, from no other page.
    assert _send(studio, ("evil.py", code.encode())).status == 401
    assert _send(studio, ("evil.py", code.encode()), Origin="http://127.0.0.1:1", **page.headers).status == 403
    assert not list((studio.places.cache / "uploads").rglob("evil*"))

    # 2. What was sent is data: no module for any process of Loft's, and no script for a browser.
    module = _kept_like_a_module(studio, code, page.headers)
    (weights,) = map(Path, json.loads(_send(studio, ("evil.safetensors", pickled), **page.headers).body))
    dotted = ".".join(module.relative_to(studio.places.root).with_suffix("").parts)
    shown = ask(studio.port, f"/gradio_api/file={module}", **page.headers)
    assert shown.headers["content-disposition"].startswith("attachment")
    done = _child(studio, "-c", f"import importlib; importlib.import_module({dotted!r})")
    assert "ModuleNotFoundError" in done.stderr and all(part.isidentifier() for part in dotted.split("."))
    nothing_ran()

    # 3. The form: Start with that class, and with that file where weights are named.
    for name, value, why in (
        ("customized_optimizer", f"{dotted}.X", "of no package known"),
        ("customized_optimizer", "os.system", "of no package known"),
        ("customized_optimizer", str(module), "of no package known"),
        ("preset_lora_path", str(weights), "is a pickle"),
        ("lora_checkpoint", str(weights), "is a pickle"),
        ("lora_target_modules", f"__import__({dotted!r})", "No module of"),
    ):
        values = {f"set_{name}": value, "set_dataset_base_path": str(DATASET)}
        reply = page.post(start, page.sent(start, **values))
        assert reply.status == 200 and why in reply.body.decode(), (name, value, reply.body[:300])
        nothing_ran()

    # 4. A run's settings, as if the form had taken them: Resume starts no process for them, nor for what a process's record says.
    refused = [
        _settings(studio, customized_optimizer=f"{dotted}.X"),
        _settings(studio, customized_optimizer=f"{dotted}.X", allow_custom_code=True),
        _settings(studio, command=[sys.executable, str(module)]),
    ]
    argv = [sys.executable, str(module)]
    for folder in refused:
        (folder / "process.json").write_text(json.dumps({"pid": 1, "created": 1.0, "argv": argv}))
        reply = page.post(resume, [{"run": folder.name, "picture": "", "lora": ""}])
        assert reply.status == 200 and b"notice bad" in reply.body, reply.body[:300]
        assert not (folder / "log.txt").exists(), "no process was started"
    nothing_ran(*refused)

    # 5. The process, as if Resume had started it; also for what is only found out there.
    passed = [
        _settings(studio, dataset_base_path=str(DATASET), **values)
        for values in (
            {"customized_optimizer": f"torch.optim.{dotted}.X"},
            {"customized_optimizer": f"transformers.optimization.{dotted}.X"},
            {"optimizer_args": json.dumps({"lr": f"__import__({dotted!r})"})},
            {"model_paths": json.dumps([str(weights)])},
            {"tokenizer_path": str(module.parent)},
            {"vram": json.dumps({"customized_optimizer": f"{dotted}.X"})},
        )
    ]
    done = _child(studio, "-c", TRAIN, *map(str, [*refused, *passed]))
    ended = [line for line in done.stdout.splitlines() if line.startswith("ended")]
    assert ended == ["ended with 2"] * len(refused + passed), (ended, done.stderr[-2000:])
    nothing_ran(*refused, *passed)

    # 6. The class, as if the settings had been read; then as if the list of packages did not count.
    find = "from backend.training.optim.optimizers import find_class\n"
    for call, why in (
        (f"find_class({dotted + '.X'!r})", "not_allowed"),
        (f"find_class({dotted + '.X'!r}, custom=True)", "missing_package"),
    ):
        script = f"{find}from backend.schema.messages import Trouble\ntry:\n    {call}\nexcept Trouble as trouble:\n    print(trouble.kind)"
        done = _child(studio, "-c", script)
        assert done.stdout.strip() == why and not mark.exists(), done.stderr[-500:]

    # 7. The file, as if it had been taken for weights.
    script = (
        "import sys\nfrom backend.engine.api.load_state_dict import load_state_dict\nfrom backend.schema.messages import Trouble\n"
        "try:\n    load_state_dict(sys.argv[1])\nexcept Trouble as trouble:\n    print(trouble.kind)"
    )
    done = _child(studio, "-c", script, str(weights))
    assert done.stdout.strip() and not mark.exists(), done.stderr[-500:]
    nothing_ran(*refused, *passed)
