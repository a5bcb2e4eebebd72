"""The project's modules and what they import, for tests of its layers and for the count of its structure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from backend.schema.paths import PROJECT


def sources() -> list[Path]:
    folders = (PROJECT / "backend", PROJECT / "studio", PROJECT / "recipes")
    found = (path for folder in folders for path in folder.rglob("*.py") if path.name != "sitecustomize.py")
    return sorted([PROJECT / "launch.py", *found])


def module_of(path: Path) -> str:
    parts = path.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sources()}
PACKAGES = sorted({".".join(path.relative_to(PROJECT).parent.parts) for path in sources()} - {""})


def package_of(module: str) -> str:
    """The package that a module lies in; a package is its own."""
    return module if module in PACKAGES else module.rpartition(".")[0]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path, *, also_in_functions: bool) -> Iterator[tuple[str, int]]:
    """(module, line) of every import, those by `importlib.import_module("...")` too; for `from a import b` both `a`
    and `a.b`, since `b` may be a module."""
    for node in _nodes(tree_of(path), also_in_functions):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
            if isinstance(name, str):
                yield name, node.lineno


def _nodes(tree: ast.AST, also_in_functions: bool) -> Iterator[ast.AST]:
    """Every node; without functions only what runs at import (types for checkers alone do not)."""
    for node in ast.iter_child_nodes(tree):
        if not also_in_functions and (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _for_checkers(node)):
            continue
        yield node
        yield from _nodes(node, also_in_functions)


def _for_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@cache
def own_imports(path: Path) -> tuple[tuple[str, int], ...]:
    """(module of the project, line) of every import of one, the most exact module that it names."""
    found = [(name, line) for name, line in imports(path, also_in_functions=True) if name in MODULES]
    parents = {(name.rpartition(".")[0], line) for name, line in found}
    return tuple((name, line) for name, line in found if (name, line) not in parents)
