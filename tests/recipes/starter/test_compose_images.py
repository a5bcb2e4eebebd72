"""Sprites on grounds, drawn shapes, tints, and the files of a training set."""

import json

import numpy as np
import pytest
from PIL import Image

from recipes.starter import compose_images, training_images
from recipes.starter.captions import Concept


def dot(colour, size=128):
    sprite = np.zeros((size, size, 4), np.uint8)
    sprite[32:96, 32:96] = (*colour, 255)
    return sprite


def test_a_sprite_covers_its_place_and_nothing_else():
    picture = compose_images.ground((255, 255, 255))
    compose_images.place(picture, dot((200, 0, 0)), centre=(32, 64), side=64)
    found = compose_images.pixels(picture)
    assert tuple(found[64, 32]) == (200, 0, 0)
    assert (found[:, 64:] == 255).all()


def test_what_hangs_over_the_edge_is_cut():
    picture = compose_images.ground((0, 0, 0))
    compose_images.place(picture, dot((0, 200, 0)), centre=(0, 0), side=128)
    assert tuple(compose_images.pixels(picture)[0, 0]) == (0, 200, 0)


@pytest.mark.parametrize("shape", compose_images.SHAPES)
def test_shapes_are_of_one_colour_and_fill_a_good_part(shape):
    sprite = compose_images.shape_sprite(shape, (10, 20, 200))
    solid = sprite[..., 3] == 255
    assert 0.15 < solid.mean() < 0.9
    assert (np.abs(sprite[solid][:, :3].astype(int) - (10, 20, 200)) <= 1).all()


def test_shapes_differ():
    outlines = [compose_images.shape_sprite(shape, (0, 0, 0))[..., 3] > 128 for shape in compose_images.SHAPES]
    for i, first in enumerate(outlines):
        assert all((first != second).mean() > 0.02 for second in outlines[i + 1 :])


def test_a_tint_turns_the_main_colour_and_leaves_the_rest():
    sprite = dot((220, 40, 40))
    sprite[32:40, 32:96, :3] = (250, 250, 250)
    blue = compose_images.recoloured(sprite, "blue")
    red, green, strong = blue[80, 64, :3].astype(int)
    assert strong > red + 60 and strong > green
    assert (np.abs(blue[34, 64, :3].astype(int) - 250) < 4).all()
    assert (blue[..., 3] == sprite[..., 3]).all()


def test_a_set_lists_what_it_draws(tmp_path):
    out = training_images.Set(tmp_path)
    looks = {"3d": dot((220, 40, 40)), "flat": dot((200, 0, 0))}
    training_images.add_concept(out, 5, Concept("x", ("car", "automobile")), looks, np.random.default_rng(0))
    out.close()
    lines = [json.loads(line) for line in (tmp_path / "metadata.jsonl").read_text("utf-8").splitlines()]
    assert all(Image.open(tmp_path / line["image"]).size == (128, 128) for line in lines)
    said = {text for line in lines for text in line["prompt"]}
    assert {"a car", "an automobile", "a flat icon of a car", "a small car", "a blue car"} <= said
    assert sum(line["image"] == "images/005-car.png" for line in lines) == training_images.WHITE_LINES
