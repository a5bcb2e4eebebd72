"""Small files are whole, whoever else writes them at the same moment."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backend.schema.paths import PROJECT
from backend.system import atomic_files
from backend.system.atomic_files import replacing, write_bytes, write_json, write_text


def test_threads_that_write_the_same_file_do_not_take_each_others_part(tmp_path):
    target = tmp_path / "training.json"
    texts = [json.dumps({"number": n, "filler": "x" * n * 100}) for n in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: write_text(target, texts[n % 8]), range(160)))
    assert target.read_text() in texts
    assert list(tmp_path.iterdir()) == [target]


def test_an_error_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    target = tmp_path / "state.json"
    write_json(target, {"step": 1})
    with pytest.raises(RuntimeError), replacing(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert json.loads(target.read_text()) == {"step": 1}
    assert list(tmp_path.iterdir()) == [target]


def test_windows_is_asked_again_while_another_program_reads_the_old_file(tmp_path, monkeypatch):
    target, refused = tmp_path / "a.json", []
    original = Path.replace

    def replace(self, other):
        if len(refused) < 3:
            refused.append(self)
            raise PermissionError(13, "another program is using this file")
        return original(self, other)

    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(atomic_files.sys, "platform", "win32")
    monkeypatch.setattr(atomic_files, "RENAME_WAIT_SECONDS", 0.0)
    write_text(target, "new")
    assert target.read_text() == "new" and len(refused) == 3


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps the folder's rights")
def test_a_private_file_is_its_owners_alone(tmp_path):
    write_bytes(tmp_path / "private", b"x", private=True)
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600


def test_no_other_module_renames_what_it_has_written():
    """Atomic writes have one owner: temporary names and renames over them are made by `atomic_files`."""
    renames = re.compile(r"os\.replace\(|mkstemp\(|(?:temporary|partial|draft|making|part_file)\.replace\(")
    for package in ("backend", "studio"):
        for path in (PROJECT / package).rglob("*.py"):
            name = path.relative_to(PROJECT).as_posix()
            assert name.endswith("system/atomic_files.py") or not renames.search(path.read_text(encoding="utf-8")), name
