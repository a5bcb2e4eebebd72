"""Imports go one way, heavy libraries stay where they belong, and the page starts without them."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.schema.places import PROJECT

HEAVY = {"torch", "torchvision", "diffusers", "transformers", "modelscope", "peft", "accelerate", "bitsandbytes"}
# Each layer and the layers of the project that it may import.
MAY_IMPORT = {
    # what a run will read is read by the page too, before it runs: no heavy library
    "backend.training.ahead": {"backend.training", "backend.families", "backend.catalog", "backend.schema"},
    "launch": {"launch", "studio", "backend.host", "backend.schema"},
    "studio": {
        "studio",
        "backend.training.ahead",
        "backend.host",
        "backend.families",
        "backend.catalog",
        "backend.schema",
    },
    "backend.host": {"backend.host", "backend.families", "backend.catalog", "backend.schema"},
    "backend.families": {"backend.families", "backend.catalog", "backend.schema"},
    "backend.catalog": {"backend.catalog", "backend.schema"},
    "backend.schema": {"backend.schema"},
    "backend.engine": {"backend.engine", "backend.families", "backend.catalog", "backend.schema"},
    "backend.pipelines": {
        "backend.pipelines",
        "backend.engine",
        "backend.families",
        "backend.catalog",
        "backend.schema",
    },
    "backend.training": {
        "backend.training",
        "backend.training.ahead",
        "backend.engine",
        "backend.families",
        "backend.catalog",
        "backend.schema",
    },
}
# Their functions may import heavy libraries, since only the engine calls those; importing the modules brings none.
HEAVY_INSIDE_FUNCTIONS = ("backend.families", "backend.catalog.hubs")
MAY_BE_HEAVY = {"backend.engine", "backend.training", "backend.pipelines"}
STANDARD_LIBRARY_ONLY = ("launch.py", "backend/host/environment.py", *(f"backend/schema/{name}" for name in ("*.py",)))


def sources() -> list[Path]:
    folders = (PROJECT / "backend", PROJECT / "studio")
    return sorted([PROJECT / "launch.py", *(path for folder in folders for path in folder.rglob("*.py"))])


def module_of(path: Path) -> str:
    parts = path.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str | None:
    return next((layer for layer in MAY_IMPORT if module == layer or module.startswith(layer + ".")), None)


def imports(path: Path, *, also_in_functions: bool) -> Iterator[tuple[str, int]]:
    """(module, line) of every import; for `from a import b` both `a` and `a.b`, since `b` may be a module."""
    for node in _nodes(ast.parse(path.read_text(encoding="utf-8")), also_in_functions):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def _nodes(tree: ast.AST, also_in_functions: bool) -> Iterator[ast.AST]:
    """Every node; without functions only what runs at import (types for checkers alone do not)."""
    for node in ast.iter_child_nodes(tree):
        if not also_in_functions and (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _for_checkers(node)):
            continue
        yield node
        yield from _nodes(node, also_in_functions)


def _for_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_imports_go_one_way(path):
    layer = layer_of(module_of(path))
    wrong = [
        f"line {line}: {name}"
        for name, line in imports(path, also_in_functions=True)
        if name.split(".")[0] in ("backend", "studio", "launch")
        and layer_of(name) not in (MAY_IMPORT[layer] if layer else set())
        and layer_of(name) is not None
    ]
    assert not wrong, f"{layer} imports {wrong}"


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_heavy_libraries_are_imported_where_they_belong(path):
    layer = layer_of(module_of(path))
    if layer in MAY_BE_HEAVY:
        return
    in_functions = not module_of(path).startswith(HEAVY_INSIDE_FUNCTIONS)
    wrong = [
        f"line {line}: {name}"
        for name, line in imports(path, also_in_functions=in_functions)
        if name.split(".")[0] in HEAVY or name.startswith("safetensors.")
    ]
    assert not wrong, f"{layer} imports {wrong}"


@pytest.mark.parametrize("pattern", STANDARD_LIBRARY_ONLY)
def test_what_runs_before_the_installation_needs_the_standard_library_alone(pattern):
    for path in PROJECT.glob(pattern):
        for name, line in imports(path, also_in_functions=True):
            ours = name == "backend" or name.startswith(("backend.schema", "backend.host"))
            assert ours or name.split(".")[0] in sys.stdlib_module_names, f"{path}:{line} imports {name}"


def in_fresh_interpreter(*modules: str) -> set[str]:
    """Top-level names of everything that importing `modules` brings in."""
    lines = [f"import {module}" for module in modules]
    script = "\n".join(
        [*lines, "import sys, json", "print(json.dumps(sorted({n.split('.')[0] for n in sys.modules})))"]
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=PROJECT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_page_starts_without_torch():
    loaded = in_fresh_interpreter("studio.app")
    assert "gradio" in loaded
    assert not loaded & HEAVY


def test_host_catalog_schema_and_families_import_without_torch():
    layers = ("backend.host", "backend.catalog", "backend.schema", "backend.families")
    modules = [module_of(path) for path in sources() if layer_of(module_of(path)) in layers]
    assert len(modules) > 20
    loaded = in_fresh_interpreter(*modules)
    assert not loaded & HEAVY
    assert "gradio" not in loaded


def test_the_rules_catch_a_wrong_import(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text("import os\nif True:\n    import torch.nn\ndef f():\n    from backend import engine\n")
    assert list(imports(path, also_in_functions=False)) == [("os", 1), ("torch.nn", 3)]
    assert ("backend.engine", 5) in list(imports(path, also_in_functions=True))
    assert layer_of("backend.engine") == layer_of("backend.engine.load") == "backend.engine"
