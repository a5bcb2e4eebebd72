"""Imports go one way between packages, heavy libraries stay where they belong, and the page starts without them.

A package's docstring says what it is for; its line `Public:` names the modules that code outside of it may import.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys

import pytest

from backend.schema.paths import PROJECT
from tests.imports import MODULES, PACKAGES, imports, module_of, own_imports, package_of, sources

HEAVY = {"torch", "torchvision", "diffusers", "transformers", "modelscope", "peft", "accelerate", "bitsandbytes"}
MAY_BE_HEAVY = ("backend.engine", "backend.training", "backend.pipelines", "recipes")
# Their functions may import heavy libraries, since only the engine calls those; importing the modules brings none.
HEAVY_INSIDE_FUNCTIONS = ("backend.families", "backend.catalog.hub.clients")
STANDARD_LIBRARY_ONLY = (
    "launch.py",
    "backend/host/process/environment.py",
    "backend/schema/*.py",
    "backend/schema/training/*.py",
)
MOST_MODULES = 15

# From the lowest to the highest: a package imports only packages of lower levels, never one of its own level.
LEVELS = (
    ("backend.schema",),
    ("backend.schema.training", "backend.system"),
    ("backend.images",),
    ("backend.catalog",),
    ("backend.catalog.formats",),
    ("backend.catalog.lora", "backend.catalog.quantization"),
    ("backend.catalog.models",),
    ("backend.families._shared",),
    ("backend.families.flux", "backend.families.qwen_image", "backend.families.z_image"),
    ("backend.families",),
    ("backend.catalog.hub",),
    ("backend.planner.costs",),
    ("backend.planner.rules",),
    ("backend.planner",),
    ("backend.dataset",),
    ("backend.commands",),
    ("backend.host.process", "backend.engine.devices"),
    ("backend.host.runs", "backend.engine.loading"),
    ("backend.host.engine", "backend.engine.offload", "backend.engine.quantization"),
    ("backend.host", "backend.engine.lora.algorithms"),
    ("backend.engine.lora",),
    ("backend.engine.lora.tools", "backend.engine.acceleration", "backend.engine.tracing"),
    ("backend.engine.pipeline",),
    ("backend.engine.api", "backend.engine.worker", "backend.training.optim", "backend.training.checkpoint"),
    ("backend.engine", "backend.training.model"),
    ("backend.training.encoding",),
    ("backend.training.run",),
    ("backend.training", "recipes.starter"),
    ("backend",),
    ("studio.widgets",),
    ("studio.state",),
    ("studio.panels", "studio.serving"),
    ("studio.train",),
    ("studio.generate", "studio.models"),
    ("studio",),
)
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}
# Whole branches that never meet, though their levels would allow it: they are processes of their own.
NEVER = {
    "studio": ("backend.engine", "backend.training", "backend.pipelines", "recipes"),
    "backend.host": ("backend.engine", "backend.training", "backend.pipelines"),
    "backend.engine": ("backend.host", "backend.training", "backend.pipelines"),
    "backend.training": ("backend.host", "studio"),
    "backend.planner": ("backend.host", "backend.engine"),
    "backend.dataset": ("backend.host", "backend.engine"),
    "recipes": ("backend.host", "studio"),
}


def is_below(module: str, branch: str) -> bool:
    return module == branch or module.startswith(branch + ".")


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package):
    wrong = []
    for module, path in MODULES.items():
        if package_of(module) != package:
            continue
        for name, line in own_imports(path):
            other = package_of(name)
            never = next((n for branch, n in NEVER.items() if is_below(module, branch)), ())
            if other == package or name == "backend":  # the version alone
                continue
            if LEVEL[other] >= LEVEL[package] or any(is_below(name, branch) for branch in never):
                wrong.append(f"{path.relative_to(PROJECT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_small_and_says_what_it_is_for(package):
    folder = PROJECT.joinpath(*package.split("."))
    names = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert len(names) <= MOST_MODULES, sorted(names)
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    assert said, f"{package} has no docstring"
    for line in ("Read", "Public"):
        unknown = named(said, line) - names
        assert not unknown, f"{package}: {line} names {sorted(unknown)}, which are not there"


def named(docstring: str, line: str) -> set[str]:
    """The names that a package's docstring lists after `line` ("Read", "Public")."""
    found = re.search(rf"^{line}: ([\w,\s]+)\.", docstring, re.MULTILINE)
    return {name.strip() for name in found[1].split(",")} if found else set()


def test_only_public_modules_are_imported_from_outside():
    public = {
        package: named(ast.get_docstring(ast.parse(MODULES[package].read_text(encoding="utf-8"))) or "", "Public")
        for package in PACKAGES
        if package in MODULES
    }
    wrong = []
    for module, path in MODULES.items():
        for name, line in own_imports(path):
            home, _, leaf = name.rpartition(".")
            if name in PACKAGES or home == package_of(module) or home not in public:
                continue
            if leaf not in public[home] or leaf == "__main__":
                wrong.append(f"{path.relative_to(PROJECT)}:{line} imports {name}, which {home} does not offer")
    assert not wrong, "\n".join(wrong)


def test_imports_make_no_circle():
    edges = {module: {name for name, _ in own_imports(path) if name != module} for module, path in MODULES.items()}
    done, under_way = set(), []

    def visit(module: str) -> None:
        if module in done:
            return
        assert module not in under_way, " -> ".join([*under_way[under_way.index(module) :], module])
        under_way.append(module)
        for other in sorted(edges[module]):
            visit(other)
        done.add(under_way.pop())

    for module in sorted(edges):
        visit(module)


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_heavy_libraries_are_imported_where_they_belong(path):
    module = module_of(path)
    if any(is_below(module, branch) for branch in MAY_BE_HEAVY):
        return
    in_functions = not any(is_below(module, branch) for branch in HEAVY_INSIDE_FUNCTIONS)
    wrong = [
        f"line {line}: {name}"
        for name, line in imports(path, also_in_functions=in_functions)
        if name.split(".")[0] in HEAVY or name.startswith("safetensors.")
    ]
    assert not wrong, f"{module} imports {wrong}"


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


def test_what_the_page_may_import_comes_without_torch():
    light = ("schema", "system", "images", "catalog", "families", "planner", "dataset", "host")
    branches = [f"backend.{name}" for name in light]
    modules = [module for module in MODULES if any(is_below(module, branch) for branch in branches)]
    assert len(modules) > 80
    loaded = in_fresh_interpreter(*(module for module in modules if not module.endswith("__main__")))
    assert not loaded & HEAVY
    assert "gradio" not in loaded


def test_the_rules_catch_a_wrong_import(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text(
        "import os\nif True:\n    import torch.nn\ndef f():\n    from backend import engine\n"
        "    importlib.import_module('backend.engine.loading.load')\n"
    )
    assert list(imports(path, also_in_functions=False)) == [("os", 1), ("torch.nn", 3)]
    found = list(imports(path, also_in_functions=True))
    assert ("backend.engine", 5) in found and ("backend.engine.loading.load", 6) in found
    assert package_of("backend.engine.loading.load") == "backend.engine.loading"
