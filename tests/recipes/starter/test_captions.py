"""The starter's concepts and what is said about its pictures."""

from collections import Counter

import pytest

from recipes.starter import captions
from recipes.starter.captions import COMMON, TINTED, Concept, pair, read_concepts, single, thing


def test_at_least_four_hundred_concepts_each_with_a_name_of_its_own():
    concepts = read_concepts()
    assert len(concepts) >= 400
    assert len({concept.emoji for concept in concepts}) == len(concepts)
    named = Counter(name for concept in concepts for name in concept.names)
    assert [name for name, count in named.items() if count > 1] == []


def test_everyday_words_are_known():
    named = {name for concept in read_concepts() for name in concept.names}
    assert {"cat", "dog", "car", "apple", "house", "tree", "bird", "fish", "bike", "phone", "plane"} <= named


def test_common_and_tinted_things_are_concepts():
    names = {concept.name for concept in read_concepts()}
    assert set(COMMON) <= names and set(TINTED) <= names


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("cat", "a cat"),
        ("apple", "an apple"),
        ("unicorn", "a unicorn"),
        ("ufo", "a ufo"),
        ("scissors", "scissors"),
        ("cactus", "a cactus"),
        ("bread", "bread"),
        ("magnifying glass", "a magnifying glass"),
        ("umbrella", "an umbrella"),
    ],
)
def test_articles(name, phrase):
    assert thing(name) == phrase


def test_a_bare_name_means_three_dimensional_on_white():
    cat = Concept("x", ("cat", "kitten"))
    plain = single(cat, look="3d", ground="white")
    assert "a cat" in plain and "a kitten" in plain and not any("flat" in text for text in plain)
    assert all("flat" in text for text in single(cat, look="flat", ground="white"))
    assert all(text.endswith(" on an orange background") for text in single(cat, look="3d", ground="orange"))


def test_a_tint_is_not_put_before_another_colour():
    bird = Concept("x", ("bird", "red bird"))
    assert all("blue red" not in text for text in single(bird, look="3d", ground="white", tint="blue"))


def test_pairs_keep_their_sides():
    left = pair("cat", "dog", "left")
    assert "a cat left of a dog" in left and "a dog right of a cat" in left and "a cat and a dog" in left
    assert "a dog left of a cat" not in left
    assert "a dog below a cat" in pair("cat", "dog", "above")


def test_the_list_can_be_another_file(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("# head\n\N{CAT FACE} cat | kitten, kitty\n", "utf-8")
    assert captions.read_concepts(path) == [Concept("\N{CAT FACE}", ("cat", "kitten", "kitty"))]
