"""Counts the code's structure, and draws its packages: `python -m tests.structure [--figures] [--svg FILE]`.

Figures are of `backend/` and `studio/` (without tests). The picture has a row for each level of imports: a package stands above everything it
imports. Arrows that follow from others (A -> C where A -> B -> C) are left out.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from html import escape
from pathlib import Path

from backend.schema.paths import PROJECT
from tests.imports import MODULES, module_of, own_imports, package_of, tree_of

TOPS = ("backend", "studio")
LONGEST_FUNCTION = 40
PLAIN = ("told", "beside", "lies", "somebody", "EMA", "OOM")  # counted as whole words
LONGEST_LINE = 120
UNITS = re.compile(
    r"\b(bytes?|GiB|MiB|KiB|seconds?|ms|tokens?|pixels?|steps?|percent|blocks|layers|flops?|per second)\b|%", re.I
)
SHAPES = re.compile(r"\([A-Za-z0-9_]+(?:\s*[,x]\s*[\w/*+. -]+)+,?\)|\bscalar\b|\bshapes?\b")
ERRORS = re.compile(r"\bRaises\b|\bTroubles?\b|\b\w+Error\b")


@cache
def modules() -> dict[str, Path]:
    return {name: path for name, path in MODULES.items() if name.partition(".")[0] in TOPS}


def files() -> list[Path]:
    return sorted(modules().values())


def imported(module: str) -> set[str]:
    """The modules that `module` imports, anywhere in it."""
    return {name for name, _ in own_imports(modules()[module]) if name in modules()} - {module}


@cache
def arrows() -> dict[str, set[str]]:
    """package -> packages that it imports (the version in `backend/__init__.py` counts for nothing)."""
    found: dict[str, set[str]] = {package_of(module): set() for module in modules()}
    for module in modules():
        found[package_of(module)] |= {package_of(name) for name in imported(module) if name != "backend"}
    return {package: others - {package} for package, others in found.items()}


def levels(graph: dict[str, set[str]]) -> dict[str, int]:
    """0 for what imports nothing, else one more than the highest that is imported. Raises ValueError for a circle."""
    found: dict[str, int] = {}

    def level(name: str, way: tuple[str, ...] = ()) -> int:
        if name in way:
            raise ValueError("circle: " + " -> ".join([*way[way.index(name) :], name]))
        if name not in found:
            found[name] = max((1 + level(other, (*way, name)) for other in graph[name]), default=0)
        return found[name]

    for name in graph:
        level(name)
    return found


def direct(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph without arrows that follow from others."""

    known: dict[str, set[str]] = {}

    def reach(name: str) -> set[str]:
        if name not in known:
            known[name] = graph[name].union(*(reach(other) for other in graph[name]))
        return known[name]

    below = {name: reach(name) for name in graph}
    return {name: {o for o in others if not any(o in below[p] for p in others)} for name, others in graph.items()}


@cache
def functions() -> tuple[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef, bool], ...]:
    """(file, function, whether it is public: reached by names without an underscore, not inside another function)."""

    def inside(path: Path, node: ast.AST, public: bool) -> Iterator:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, child, public and not child.name.startswith("_")
                yield from inside(path, child, False)
            elif isinstance(child, ast.stmt):
                hidden = isinstance(child, ast.ClassDef) and child.name.startswith("_")
                yield from inside(path, child, public and not hidden)

    return tuple(one for path in files() for one in inside(path, tree_of(path), True))


def _body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    doc = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    return lines - ((doc.end_lineno or doc.lineno) - doc.lineno + 1 if doc else 0)


def _annotations(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return (
        " ".join(ast.unparse(a.annotation) for a in args if a.annotation)
        + " "
        + (ast.unparse(node.returns) if node.returns else "")
    )


def documented() -> dict[str, tuple[int, int]]:
    """What public functions say: name of the figure -> (those that do, all that should)."""
    tensors, units, errors = [0, 0], [0, 0], [0, 0]
    for path, node, public in functions():
        if not public:
            continue
        said = ast.get_docstring(node) or ""
        where = module_of(path)
        if "Tensor" in _annotations(node):
            tensors[1] += 1
            tensors[0] += bool(SHAPES.search(said))
        if where.startswith(("backend.planner", "backend.engine.offload")):
            units[1] += 1
            units[0] += bool(UNITS.search(said))
        if any(isinstance(n, ast.Raise) and n.exc is not None for n in ast.walk(node)):
            errors[1] += 1
            errors[0] += bool(ERRORS.search(said))
    return {
        "tensor functions with shapes": tuple(tensors),
        "functions of planner and offload with units": tuple(units),
        "functions that raise and say so": tuple(errors),
    }  # type: ignore[return-value]


def figures() -> dict[str, object]:
    """All counts, by their names."""
    texts = {path: path.read_text(encoding="utf-8") for path in files()}
    lines = sum(text.count("\n") for text in texts.values())
    graph = arrows()
    try:
        floors, circles = max(levels(graph).values()) + 1, 0
    except ValueError:
        floors, circles = 0, 1
    comments = 0
    for path in texts:
        with path.open("rb") as file:
            comments += sum(token.type == tokenize.COMMENT for token in tokenize.tokenize(file.readline))
    long = [
        f"{path.relative_to(PROJECT)}:{n}"
        for path, text in texts.items()
        for n, line in enumerate(text.split("\n"), 1)
        if len(line) > LONGEST_LINE
    ]
    big = [
        (_body_lines(node), f"{module_of(path)}.{node.name}")
        for path, node, _ in functions()
        if _body_lines(node) > LONGEST_FUNCTION
    ]
    joined = "\n".join(texts.values())
    words = (
        "prefetch",
        "offload",
        "activation",
        "quantiz",
        "dequant",
        "bucket",
        "conditioning",
        "embedding",
        "OOM",
        "checkpointing",
        "scheduler",
        "sampler",
        "EMA",
        "told",
        "beside",
        "lies",
        "somebody",
    )
    return {
        "files": len(texts), "lines": lines, "packages": len(graph), "levels": floors, "arrows between packages": sum(map(len, graph.values())),
        "arrows that do not follow from others": sum(map(len, direct(graph).values())) if not circles else None, "circles": circles,
        "most modules in a package": max(len([m for m in modules() if package_of(m) == p and m != p]) for p in graph),
        "longest file": max(text.count("\n") for text in texts.values()),
        "functions": sum(1 for _ in functions()), f"functions over {LONGEST_FUNCTION} lines": sorted(big, reverse=True),
        f"lines over {LONGEST_LINE}": len(long), "fmt: skip": joined.count("fmt: skip"), "comments, % of lines": round(100 * comments / lines, 1),
        **documented(),
        "words per 10,000 lines": {word: round(1e4 * len(re.findall(rf"\b{word}\b" if word in PLAIN else word, joined, 0 if word.isupper() else re.I)) / lines, 1) for word in words},
    }  # fmt: skip


COLOURS = {"schema": "#8d99ae", "system": "#8d99ae", "images": "#8d99ae", "catalog": "#5b8fb9", "families": "#7d6bb3", "planner": "#3f9c7a", "dataset": "#b9863d", "commands": "#8d99ae", "host": "#c0616b", "engine": "#d0803a", "training": "#a6588f", "studio": "#4f6bd0"}  # fmt: skip


def svg() -> str:
    """The packages as boxes, one row a level, with the arrows between them that do not follow from others."""
    graph = arrows()
    graph = {
        name: others for name, others in graph.items() if any(package_of(m) == name and m != name for m in modules())
    }
    graph = {name: others & set(graph) for name, others in graph.items()}
    found, lines = levels(graph), direct(graph)
    rows: dict[int, list[str]] = defaultdict(list)
    for name, level in sorted(found.items()):
        rows[level].append(name)
    order: dict[str, float] = {}
    for level in sorted(rows):  # each row by the middle of what it imports, so that fewer arrows cross

        def middle(name: str) -> float:
            seen = [order[other] for other in lines[name] if other in order]
            return sum(seen) / len(seen) if seen else 0.5

        rows[level].sort(key=lambda name: (middle(name), name))
        for at, name in enumerate(rows[level]):
            order[name] = (at + 0.5) / len(rows[level])
    width, tall, high = 1180, 30, 62
    top = max(rows)
    box = {}
    for level, names in rows.items():
        widths = [7.2 * len(_label(name)) + 22 for name in names]
        gap = (width - sum(widths)) / (len(names) + 1)
        x = gap
        for name, wide in zip(names, widths, strict=True):
            box[name] = (x, 20 + (top - level) * high, wide)
            x += wide + gap
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {40 + top * high + tall}" font-family="system-ui, sans-serif" font-size="12">',
        "<title>Packages of Loft and what they import</title>",
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for name, others in sorted(lines.items()):
        x, y, wide = box[name]
        for other in sorted(others):
            ox, oy, owide = box[other]
            a, b = (x + wide / 2, y + tall), (ox + owide / 2, oy)
            bend = (b[1] - a[1]) / 2
            out.append(
                f'<path d="M{a[0]:.0f} {a[1]:.0f} C{a[0]:.0f} {a[1] + bend:.0f} {b[0]:.0f} {b[1] - bend:.0f} {b[0]:.0f} {b[1]:.0f}" fill="none" stroke="{_colour(name)}" stroke-opacity=".5"/>'
            )
    for name, (x, y, wide) in sorted(box.items()):
        count = sum(1 for m in modules() if package_of(m) == name and m != name)
        out.append(
            f'<g><title>{escape(name)}: {count} modules</title><rect x="{x:.0f}" y="{y:.0f}" width="{wide:.0f}" height="{tall}" rx="6" fill="{_colour(name)}"/>'
            f'<text x="{x + wide / 2:.0f}" y="{y + 19:.0f}" text-anchor="middle" fill="#fff">{escape(_label(name))}</text></g>'
        )
    return "\n".join([*out, "</svg>", ""])


def _label(name: str) -> str:
    return name.removeprefix("backend.")


def _colour(name: str) -> str:
    return COLOURS.get(_label(name).partition(".")[0], "#666")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.structure", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--figures", action="store_true", help="print the counts as JSON")
    parser.add_argument("--svg", type=Path, help="write the picture of packages there")
    said = parser.parse_args(argv)
    if said.svg:
        said.svg.write_text(svg(), encoding="utf-8")
    if said.figures or not said.svg:
        print(json.dumps(figures(), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
