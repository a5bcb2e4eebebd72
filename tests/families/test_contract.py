"""The contract of families: what each has to have, in which form, and that nothing else is known of any of them elsewhere."""

from __future__ import annotations

import ast
import inspect
import re
from types import ModuleType

import pytest

from backend.catalog.family import (
    OPTIONAL,
    REQUIRED,
    TO_DRAW,
    DrawSettings,
    EditRule,
    Family,
    Guidance,
    Prediction,
    complete,
)
from backend.families import FAMILIES, by_name
from backend.schema.paths import PROJECT

FUNCTIONS = tuple(name for name in OPTIONAL if inspect.isfunction(Family.__dict__[name]))
each = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.NAME)


@each
def test_its_functions_are_called_as_the_contract_says(family):
    """Same names of parameters, in the same order and of the same kind: everything outside calls them by the contract alone."""
    for name in FUNCTIONS:
        function = getattr(family, name, None)
        if function is None:
            assert name in TO_DRAW and not family.DRAWS, name
            continue
        wanted = [(one.name, one.kind) for one in inspect.signature(Family.__dict__[name]).parameters.values()][1:]
        found = [(one.name, one.kind) for one in inspect.signature(function).parameters.values()]
        assert found == wanted, f"{family.NAME}.{name}"


@each
def test_its_constants_are_of_the_contracts_kinds(family):
    for name in (*REQUIRED, *OPTIONAL):
        if name.isupper():
            value, usual = getattr(family, name), Family.__dict__.get(name)
            assert not isinstance(value, ModuleType), f"{name} is a module of the package"
            kind = type(usual) if isinstance(usual, bool | int | str | tuple) else None
            assert kind is None or isinstance(value, kind), name
    variants = {signature.variant for signature in family.SIGNATURES if signature.part == "dit"}
    assert all(isinstance(rule, EditRule) for rule in family.EDITS.values())
    for variant in (*variants, *family.EDITS):
        assert isinstance(family.guidance(variant), Guidance) and family.sizes(variant).multiple > 0
        said = family.prediction(variant, family.SCHEDULER)
        assert isinstance(said, Prediction) and said.kind in ("velocity", "epsilon", "v", "x0")
        assert said.noising in ("flow", "exploding")
        settings = DrawSettings(512, 512, guidance=4.0, variant=variant, scheduler=family.SCHEDULER)
        first, *others = family.branches(settings)
        assert first.name == "positive" and all(branch.name != "positive" for branch in others)
        networks = family.parts_of("denoise", variant)
        assert family.expert(settings, 0.5) in networks and {branch.part for branch in others} <= {"", *networks}
    assert all(part.label or family.part_label(name) for name, part in family.PARTS.items())


def test_what_a_module_lacks_is_said_when_it_is_completed():
    empty = ModuleType("backend.families.empty")
    with pytest.raises(TypeError, match=r"empty is no family: it lacks NAME, TITLE, PARTS"):
        complete(empty)
    for name in REQUIRED:
        setattr(empty, name, None)
    empty.DRAWS = True
    with pytest.raises(TypeError, match=r"it lacks load_tokenizer, encode_text, collate, .*predict"):
        complete(empty)
    empty.DRAWS = False
    assert complete(empty).WORDS == () and empty.branches.__self__ is empty


# --- Nobody else knows a family ---------------------------------------------------------------------------------------------------------

FAMILY_WORDS = re.compile(
    r"qwen|flux|z[-_ ]?image|sdxl|sd_?(?:15|3)(?!\d)|\bwan\b|wan[-_ ]?2|stable.?diffusion.?(?:\d|xl)", re.I
)
# What is not of a family here though it is called like one: (file, what stands there, why).
NO_FAMILY = (
    (
        "backend/catalog/lora/metadata.py",
        r"qwen|wan|zimage|flux_2",
        "modules of another trainer, by which its files are known",
    ),
)


def code_of(tree: ast.AST):
    """(line, text) of every name and every string that is no docstring."""
    docstrings = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if node not in docstrings:
                yield node.lineno, text
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text) | ast.keyword(arg=str(text)):
                yield node.lineno, text
            case ast.FunctionDef(name=text) | ast.ClassDef(name=text):
                yield node.lineno, text
            case ast.ImportFrom(module=str(text)):
                yield node.lineno, text
            case ast.alias(name=text):
                yield node.lineno, text


def sources():
    for top in ("backend", "studio"):
        for path in sorted((PROJECT / top).rglob("*.py")):
            name = path.relative_to(PROJECT).as_posix()
            if not name.startswith("backend/families/"):
                yield name, ast.parse(path.read_text(encoding="utf-8"))


def test_no_familys_name_class_or_variant_stands_outside_its_module():
    networks = {part.network.rpartition(":")[2] for family in FAMILIES for part in family.PARTS.values()}
    shared = {"AutoencoderKL", "CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel", "UNet2DConditionModel"}
    exact = {*(family.PIPELINE for family in FAMILIES), *(networks - shared)}
    wrong = []
    for name, tree in sources():
        allowed = next((pattern for path, pattern, _ in NO_FAMILY if path == name), None)
        for line, text in code_of(tree):
            found = FAMILY_WORDS.search(text)
            if text in exact or (found and not (allowed and re.search(allowed, text, re.I))):
                wrong.append(f"{name}:{line}: {text[:80]}")
    assert not wrong, "\n".join(wrong)


def test_no_variant_is_compared_with_a_word_outside_families():
    """What is true of a variant its family says."""
    wrong = []
    for name, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                asks = any(ast.unparse(side).rpartition(".")[2] in ("variant", "NAME", "family") for side in sides)
                if asks and any(isinstance(side, ast.Constant) and side.value for side in sides):
                    wrong.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def test_nothing_asks_a_family_by_getattr():
    wrong = []
    for name, tree in sources():
        if name == "backend/catalog/family.py":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and node.args:
                asked = ast.unparse(node.args[0]).rpartition(".")[2]
                members = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
                if "famil" in asked.lower() or members in (*REQUIRED, *OPTIONAL):
                    wrong.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def test_a_family_is_found_by_its_name():
    assert all(by_name(family.NAME) is family for family in FAMILIES)
    with pytest.raises(KeyError, match="no family 'nix'"):
        by_name("nix")
