"""What is kept out while networks are imported, and when it is not."""

from __future__ import annotations

import sys

import pytest

from backend.engine.loading import lazy_imports


@pytest.mark.parametrize("package", ["torchao", "bitsandbytes"])
def test_the_compiler_is_there_for_packages_that_want_its_insides(monkeypatch, package):
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    monkeypatch.setattr(lazy_imports.importlib.util, "find_spec", lambda name: object() if name == package else None)
    before = list(sys.meta_path)
    with lazy_imports._without_compiler():
        assert sys.meta_path == before
        assert "torch._dynamo" not in sys.modules
