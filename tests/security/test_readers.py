"""One reader for what others wrote: nothing but `parse_json` and what stands on it reads JSON, except what Loft itself has written."""

from __future__ import annotations

import ast
from pathlib import Path

from backend.schema.paths import PROJECT

OWN = {  # and why that needs no validating reader
    "backend/schema/json_values.py": "is the reader",
    "backend/schema/login.py": "a line that the launcher writes into the studio's pipe",
    "backend/catalog/lora/peft_patterns.py": "a process of its own, asked and answered through pipes",
    "backend/catalog/lora/module_names.py": "a table in the package",
    "backend/planner/costs/model_sizes.py": "a table in assets",
    "backend/engine/tracing/trace.py": "tables and the shipped model in assets",
    "backend/engine/lora/tools/key_tables.py": "a configuration in the package, as text",
    "backend/engine/worker/protocol.py": "the studio's own pipe to its worker",
    "backend/training/model/fsdp.py": "a variable that the launcher sets for its own processes",
    "studio/serving/api_calls.py": "a call of the page: bounded, cleaned and checked where it is read",
}
READERS = {("json", "load"), ("json", "loads"), ("pickle", "load"), ("pickle", "loads"), ("yaml", "load"), ("marshal", "loads"), ("shelve", "open"),
           ("ast", "literal_eval"), ("torch", "load"), ("numpy", "load"), ("np", "load")}  # fmt: skip
RUNNERS = {"eval", "exec", "compile", "__import__"}


def _is_safe(call: ast.Call) -> bool:
    """Whether it says that what is unpickled makes nothing but tensors."""
    return any(one.arg == "weights_only" and getattr(one.value, "value", None) is True for one in call.keywords)


def calls_of(path: Path) -> set[str]:
    """What of `READERS` and `RUNNERS` a module calls or hands on, however it is imported."""
    found, renamed = set(), {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            renamed |= {one.asname or one.name: one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{one.name}" for one in node.names if (node.module, one.name) in READERS}
    runs_nothing = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_safe(node)}
    for node in ast.walk(tree):
        if id(node) in runs_nothing:
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = renamed.get(node.value.id, node.value.id), node.attr
            found |= {".".join(name)} if name in READERS else set()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RUNNERS:
            found.add(node.func.id)
    return found


def test_only_the_validating_reader_reads_what_others_wrote():
    modules = [
        *(PROJECT / "backend").rglob("*.py"),
        *(PROJECT / "studio").rglob("*.py"),
        PROJECT / "launch.py",
        PROJECT / "train.py",
    ]
    found = {path.relative_to(PROJECT).as_posix(): calls_of(path) for path in modules}
    reading = {name: calls for name, calls in found.items() if calls}
    bare = {name for name, calls in reading.items() if any(call.startswith("json.") for call in calls)}
    assert len(modules) > 200 and bare == set(OWN), (bare - set(OWN), set(OWN) - bare)
    others = {(name, call) for name, calls in reading.items() for call in calls if not call.startswith("json.")}
    assert not others, "what makes objects or runs code is not for data at all"
