"""Settings: written once, read back equal from flags, files and forms; wrong ones refused in a sentence."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.schema import settings as knobs
from backend.schema.messages import Trouble
from backend.schema.preferences import Preferences
from backend.schema.request import GenerationRequest
from backend.schema.settings import (
    from_file_text,
    from_flags,
    from_values,
    knob,
    section,
    to_file_text,
    to_flags,
    to_values,
)
from backend.schema.training.config import TrainingConfig


@dataclass(frozen=True)
class Size:
    height: int | None = knob(None, help="Fixed height.", low=16, high=4096, unit="px")
    big: int = knob(9, help="A large number.", low=-1, high=2**26)
    scale: float = knob(1.5, help="Scale: 100 % is 1.", low=0.0)


@dataclass(frozen=True)
class Small:
    title: str = knob("untitled", help="A title.")
    mode: str = knob("soft", help="A mode.", choices=("soft", "hard"))
    fast: bool = knob(True, help="Fast.", label="Be fast")
    tags: tuple[str, ...] = knob(("a", "b"), help="Tags.")
    size: Size = section(Size, "Size")


def test_knobs_are_found_in_order_with_their_place():
    found = list(knobs.knobs_of(Small))
    assert [item.name for item in found] == ["title", "mode", "fast", "tags", "height", "big", "scale"]
    height = found[4]
    assert (height.path, height.section, height.kind, height.optional) == (("size", "height"), "Size", int, True)
    assert (found[2].label, found[4].label) == ("Be fast", "Height")


@pytest.mark.parametrize("cls", [TrainingConfig, GenerationRequest, Preferences])
def test_every_setting_is_named_once_explained_and_its_default_is_allowed(cls):
    found = list(knobs.knobs_of(cls))
    names = [item.name for item in found]
    assert len(names) == len(set(names))
    for item in found:
        assert item.help.strip().endswith((".", "…")), f"{item.name}: {item.help!r} is no sentence"
        assert item.level in ("basic", "advanced", "hidden")
    assert from_values(cls, to_values(cls())) == cls()


# What is wrong, and what is said of it.
WRONG = [
    ({"titel": "x"}, r"no setting called 'titel'\. Did you mean 'title'\?"),
    ({"zzz": 1}, r"no setting called 'zzz'\. See docs/settings\.md"),
    ({"height": 15}, r"Height \(--height\) is 15; the least is 16\."),
    ({"height": 5000}, r"Height \(--height\) is 5000; the most is 4096\."),
    ({"big": 2**26 + 1}, r"is 67108865; the most is 67108864\."),
    ({"height": "tall"}, r"Height \(--height\) is 'tall', which is not a whole number\."),
    ({"height": 16.5}, "is 16.5, which is not a whole number"),
    ({"height": True}, "is True, which is not a whole number"),
    ({"scale": -0.1}, r"is -0\.1; the least is 0"),
    ({"scale": "nan"}, "is not a number"),
    ({"scale": math.inf}, "is not a number"),
    ({"scale": None}, r"Scale \(--scale\) needs a value"),
    ({"mode": "medium"}, r"is 'medium'; it can be soft, hard\."),
    ({"mode": 3}, "is 3, which is not a text"),
    ({"fast": "perhaps"}, "is not yes or no"),
    ({"fast": 2}, "is not yes or no"),
    ({"fast": None}, "needs a value"),
    ({"tags": 3}, "is not a list"),
]


@pytest.mark.parametrize(("values", "said"), WRONG, ids=[str(values) for values, _ in WRONG])
def test_wrong_values_are_refused_in_a_sentence(values, said):
    with pytest.raises(Trouble, match=said) as caught:
        from_values(Small, values)
    assert caught.value.kind in ("unknown_setting", "bad_value")


# A value as a form or a file gives it, and what it means.
RIGHT = [
    ("height", "64", 64),
    ("height", 64.0, 64),
    ("height", "", None),
    ("height", "None", None),
    ("height", None, None),
    ("scale", "0", 0.0),
    ("scale", 2, 2.0),
    ("scale", "1e-4", 1e-4),
    ("fast", "off", False),
    ("fast", "YES", True),
    ("fast", "0", False),
    ("title", "", ""),
    ("title", "0", "0"),
    ("tags", "x, y,\n z,,", ("x", "y", "z")),
    ("tags", ["one, two"], ("one, two",)),
    ("tags", "", ()),
]


@pytest.mark.parametrize(("name", "given_value", "meant"), RIGHT)
def test_values_are_taken_as_they_are_meant(name, given_value, meant):
    assert to_values(from_values(Small, {name: given_value}))[name] == meant


@pytest.mark.parametrize("name", ["fp8_products", "step_cache", "compile"])
def test_what_only_drawing_has_is_refused_in_training_with_the_reason(name):
    for attempt in (
        lambda: from_values(TrainingConfig, {name: True}),
        lambda: from_flags(TrainingConfig, [f"--{name}"]),
    ):
        with pytest.raises(Trouble, match=r"training|drawing") as caught:
            attempt()
        assert caught.value.kind == "not_supported" and name in caught.value.hint
    assert from_flags(TrainingConfig, ["--output_path", name])


def test_false_and_zero_are_values():
    base = from_values(Small, {"fast": True, "scale": 2.0})
    changed = from_values(Small, {"fast": False, "scale": 0}, base=base)
    assert (changed.fast, changed.size.scale) == (False, 0.0)
    assert json.loads(to_file_text(changed)) == {"fast": False, "scale": 0.0}
    assert to_flags(changed) == ["--no-fast", "--scale", "0.0"]


def test_a_base_keeps_what_is_not_named():
    base = from_values(Small, {"height": 99, "title": "kept"})
    assert from_values(Small, {"scale": 3}, base=base) == dataclasses.replace(base, size=Size(height=99, scale=3.0))


def test_flags():
    config = from_flags(Small, ["--no-fast", "--height", "64", "--tags", "x,y", "--title=--odd one"])
    assert config == Small(title="--odd one", fast=False, tags=("x", "y"), size=Size(height=64))
    assert from_flags(Small, []) == Small()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--heigth", "64"], "unrecognized arguments: --heigth 64. Did you mean 'height'"),
        (["--heig", "64"], "unrecognized arguments: --heig"),
        (["--height"], "expected one argument"),
        (["--fast", "yes"], "unrecognized arguments: yes"),
        (["stray"], "unrecognized arguments: stray"),
        (["--height", "3"], "the least is 16"),
    ],
)
def test_wrong_flags_are_refused_in_a_sentence(argv, said):
    with pytest.raises(Trouble, match=said):
        from_flags(Small, argv)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"x"', "nul"])
def test_files_that_hold_no_settings(text):
    with pytest.raises(Trouble, match="settings file") as caught:
        from_file_text(Small, text)
    assert caught.value.kind == "bad_file"


def test_a_file_holds_only_what_differs_and_its_text_as_it_is():
    config = from_values(Small, {"title": 'Käse 猫 "quoted" \\ back', "mode": "soft"})
    assert to_file_text(config) == '{\n  "title": "Käse 猫 \\"quoted\\" \\\\ back"\n}\n'
    assert from_file_text(Small, to_file_text(config)) == config


def values_of(cls: type) -> st.SearchStrategy:
    """Any allowed values of some of a config's settings."""
    return st.fixed_dictionaries({}, optional={item.name: _value(item) for item in knobs.knobs_of(cls)})


def _value(item: knobs.Knob) -> st.SearchStrategy:
    if item.choices:
        return st.sampled_from(item.choices)
    if item.name == "customized_optimizer":  # a dotted name is checked against a list of packages
        return st.sampled_from(["", "adamw", "Lion", "torch.optim.NAdam"])
    low, high = item.low, item.high
    word = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters=","), min_size=1, max_size=9)
    kinds = {
        bool: st.booleans(),
        int: st.integers(int(low if low is not None else -(2**53)), int(high if high is not None else 2**53)),
        float: st.floats(low, high, allow_nan=False, allow_infinity=False),
        str: st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=30).filter(
            lambda text: not item.optional or text.strip() not in ("", "None")
        ),
        tuple: st.lists(word.map(str.strip).filter(bool), max_size=3).map(tuple),
    }
    return kinds[item.kind] | st.none() if item.optional else kinds[item.kind]


def test_a_value_of_two_dashes_is_a_value():
    assert from_flags(Small, ["--title=--"]).title == "--"


@pytest.mark.parametrize("cls", [Small, TrainingConfig, Preferences])
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_flags_and_files_are_read_back_equal(cls, data):
    config = from_values(cls, data.draw(values_of(cls)))
    assert from_flags(cls, to_flags(config)) == config
    assert from_file_text(cls, to_file_text(config)) == config
    assert from_values(cls, json.loads(json.dumps(to_values(config)))) == config


def test_the_reference_page_names_every_setting():
    page = knobs.reference(Small, "Small")
    assert page.startswith("## Small\n")
    for item in knobs.knobs_of(Small):
        assert page.count(f"| `--{item.name}` |") == 1
    assert "### Size" in page and "16 to 4096 px" in page and "soft, hard" in page and "| `on` |" in page


def test_help_lists_every_flag(capsys):
    with pytest.raises(SystemExit):
        from_flags(Small, ["--help"], program="small")
    said = capsys.readouterr().out
    assert "--no-fast" in said and "100 % is 1" in said and "[default: untitled]" in said
