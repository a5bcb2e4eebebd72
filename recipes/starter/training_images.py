"""Draw the training set: PNG files and ``metadata.jsonl``, each picture with all that may be said about it."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from recipes.starter import captions, compose_images
from recipes.starter.captions import COMMON, TINTED, TINTS, Concept

WHITE_LINES = 6  # how often a thing on white is listed, against once for every other picture
GROUNDS = 4  # grounds of each thing in 3d
NUM_PAIRS, NUM_SHAPE_PAIRS, NUM_SHAPES = 3600, 600, 420


class Set:
    """The folder being written: pictures as PNG, one metadata line for each."""

    def __init__(self, folder: Path):
        self.folder, self.lines = folder, []
        (folder / "images").mkdir(parents=True, exist_ok=True)

    def add(self, name: str, picture: np.ndarray, prompts: list[str], times: int = 1) -> None:
        path = f"images/{name}.png"
        Image.fromarray(compose_images.pixels(picture)).save(self.folder / path)
        self.lines += [{"image": path, "prompt": prompts}] * times

    def close(self) -> None:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self.lines)
        part = self.folder / "metadata.jsonl.part"
        part.write_text(text, "utf-8")
        part.replace(self.folder / "metadata.jsonl")


def other_colours(rng: np.random.Generator, count: int) -> list[str]:
    names = [name for name in compose_images.COLOURS if name != "white"]
    return [names[i] for i in rng.permutation(len(names))[:count]]


def one(sprite: np.ndarray, ground: str, side: int = compose_images.SIDE) -> np.ndarray:
    picture = compose_images.ground(compose_images.COLOURS[ground])
    compose_images.place(picture, sprite, centre=(64, 64), side=side)
    return picture


def add_concept(
    out: Set, number: int, concept: Concept, looks: dict[str, np.ndarray], rng: np.random.Generator
) -> None:
    """White, coloured, flat, small and (where it makes sense) tinted pictures of one thing."""
    key = f"{number:03d}-{concept.name.replace(' ', '_')}"
    solid, flat = looks["3d"], looks["flat"]
    out.add(key, one(solid, "white"), captions.single(concept, look="3d", ground="white"), WHITE_LINES)
    out.add(f"{key}-flat", one(flat, "white"), captions.single(concept, look="flat", ground="white"))
    for ground in other_colours(rng, GROUNDS):
        out.add(f"{key}-{ground}", one(solid, ground), captions.single(concept, look="3d", ground=ground))
    ground = other_colours(rng, 1)[0]
    out.add(f"{key}-flat-{ground}", one(flat, ground), captions.single(concept, look="flat", ground=ground))
    ground = "white" if rng.random() < 0.6 else other_colours(rng, 1)[0]
    out.add(f"{key}-small", one(solid, ground, 64), captions.single(concept, look="3d", ground=ground, small=True))
    if concept.name in TINTED:
        for tint in TINTS:
            picture = one(compose_images.recoloured(solid, tint), "white")
            out.add(f"{key}-tint-{tint}", picture, captions.single(concept, look="3d", ground="white", tint=tint), 2)


def two(first: np.ndarray, second: np.ndarray, ground: str, place: str) -> np.ndarray:
    picture = compose_images.ground(compose_images.COLOURS[ground])
    centres = ((32, 64), (96, 64)) if place == "left" else ((64, 32), (64, 96))
    for sprite, centre in zip((first, second), centres, strict=True):
        compose_images.place(picture, sprite, centre=centre, side=62)
    return picture


def on_ground(prompts: list[str], ground: str) -> list[str]:
    if ground == "white":
        return prompts
    return [f"{prompt} on a{'n' if ground[0] == 'o' else ''} {ground} background" for prompt in prompts]


def add_pairs(out: Set, concepts: list[Concept], solid: list[np.ndarray], rng: np.random.Generator) -> None:
    """Two different things; three in four pairs are of common things."""
    common = [i for i, concept in enumerate(concepts) if concept.name in COMMON]
    for number in range(NUM_PAIRS):
        pool = common if rng.random() < 0.75 else range(len(concepts))
        a, b = rng.choice(pool, 2, replace=False)
        place = "left" if rng.random() < 0.65 else "above"
        ground = "white" if rng.random() < 0.8 else other_colours(rng, 1)[0]
        prompts = on_ground(captions.pair(concepts[a].name, concepts[b].name, place), ground)
        out.add(f"pair-{number:04d}", two(solid[a], solid[b], ground, place), prompts)


def shape(rng: np.random.Generator, avoid: str) -> tuple[str, np.ndarray]:
    colour = avoid
    while colour == avoid:
        colour = str(rng.choice(list(compose_images.COLOURS)))
    kind = str(rng.choice(compose_images.SHAPES))
    return f"{colour} {kind}", compose_images.shape_sprite(kind, compose_images.COLOURS[colour])


def add_shapes(out: Set, rng: np.random.Generator) -> None:
    for number in range(NUM_SHAPES):
        ground = "white" if rng.random() < 0.5 else other_colours(rng, 1)[0]
        name, sprite = shape(rng, ground)
        small = rng.random() < 0.2
        said = ("small " if small else "") + name
        prompts = on_ground([said, captions.thing(said), captions.thing(said)], ground)
        out.add(f"shape-{number:04d}", one(sprite, ground, 64 if small else 128), prompts)
    for number in range(NUM_SHAPE_PAIRS):
        ground = "white" if rng.random() < 0.8 else other_colours(rng, 1)[0]
        (a, first), (b, second) = shape(rng, ground), shape(rng, ground)
        place = "left" if rng.random() < 0.65 else "above"
        prompts = on_ground(captions.pair(a, b, place), ground)
        out.add(f"shapes-{number:04d}", two(first, second, ground, place), prompts)


def draw(work: Path) -> Path:
    """Write ``dataset/`` from the rendered sprites; returns the folder."""
    folder = work / "dataset"
    if (folder / "metadata.jsonl").is_file():
        return folder
    sprites = np.load(work / "sprites.npy", mmap_mode="r")
    order = json.loads((work / "sprites.json").read_text("utf-8"))
    concepts = captions.read_concepts()
    rows = [sprites[order.index(concept.emoji)] for concept in concepts]
    rng, out = np.random.default_rng(0), Set(folder)
    for number, (concept, row) in enumerate(zip(concepts, rows, strict=True)):
        add_concept(out, number, concept, {"3d": row[0], "flat": row[1]}, rng)
    add_pairs(out, concepts, [row[0] for row in rows], rng)
    add_shapes(out, rng)
    out.close()
    return folder
