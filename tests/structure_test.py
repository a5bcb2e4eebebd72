"""The structure keeps what it has reached: no circles, few levels, small packages; and the picture in the docs is that of the code."""

from __future__ import annotations

from backend.schema.paths import PROJECT
from tests import structure

AT_MOST = {  # each may only fall
    "levels": 15,
    "circles": 0,
    "most modules in a package": 15,
    "lines over 120": 292,
    "fmt: skip": 16,
}
AT_LEAST = {  # shares of those that should; each may only grow
    "tensor functions with shapes": 0.60,
    "functions that raise and say so": 0.76,
}


def test_figures_only_get_better():
    found = structure.figures()
    for name, most in AT_MOST.items():
        assert found[name] <= most, (name, found[name])
    for name, least in AT_LEAST.items():
        said, of = found[name]
        assert said / of >= least, (name, said, of)
    assert len(found["functions over 40 lines"]) <= 42


def test_the_picture_of_packages_is_that_of_the_imports():
    drawn = (PROJECT / "docs" / "pictures" / "packages.svg").read_text(encoding="utf-8")
    assert drawn == structure.svg(), "python -m tests.structure --svg docs/pictures/packages.svg"
