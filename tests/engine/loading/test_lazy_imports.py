"""What is kept out while networks are imported, and when it is not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from backend.engine.loading import lazy_imports
from backend.schema.paths import PROJECT


@pytest.mark.parametrize("package", ["torchao", "bitsandbytes"])
def test_the_compiler_is_there_for_packages_that_want_its_insides(monkeypatch, package):
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    monkeypatch.setattr(lazy_imports.importlib.util, "find_spec", lambda name: object() if name == package else None)
    before = list(sys.meta_path)
    with lazy_imports._without_compiler():
        assert sys.meta_path == before
        assert "torch._dynamo" not in sys.modules


SHOWS = """

import subprocess
import sys
from backend.engine.loading import lazy_imports
from backend.schema.paths import PROJECT
lazy_imports.import_module("diffusers.models.transformers.transformer_qwenimage")
print(lazy_imports.is_on(), type(sys.modules.get("diffusers.models.transformers")).__name__)
"""


@pytest.mark.torch
@pytest.mark.parametrize(("switch", "shown"), [("0", "False module"), ("", "True _LazyPackage")])
def test_an_environment_variable_turns_lazy_imports_off(switch, shown):
    """`LOFT_LAZY_IMPORTS=0`: the libraries import all that they import by themselves."""
    env = {**os.environ, "LOFT_LAZY_IMPORTS": switch}
    done = subprocess.run([sys.executable, "-c", SHOWS], capture_output=True, text=True, env=env, cwd=PROJECT)
    assert done.stdout.strip() == shown, done.stderr[-2000:]
