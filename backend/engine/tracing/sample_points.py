"""Networks of few blocks, which answer for any depth, and the points at which they are traced."""

from __future__ import annotations

TOKENS = {"n": (64, 65536), "t": (8, 2048)}  # least and most that forms are exact for


def config_of(config: dict, known: dict, depths: tuple[int, ...]) -> dict:
    """`config` with other depths, one for each of the `known` lists of blocks; a dotted key is one of an inner
    configuration."""
    changed = dict(config)
    for key, depth in zip(known["blocks"].values(), depths, strict=True):
        outer, _, inner = key.rpartition(".")
        home = dict(changed[outer]) if outer else changed
        home[inner] = depth
        if home.get("layer_types"):
            home["layer_types"] = (list(home["layer_types"]) * depth)[:depth]
        if outer:
            changed[outer] = home
    return changed


def depths_of(known: dict) -> list[tuple[int, ...]]:
    """The base depth, then one more block of each kind."""
    count = len(known["blocks"])
    return [(2,) * count] + [tuple(3 if i == j else 2 for j in range(count)) for i in range(count)]


def word(depths: tuple[int, ...]) -> str:
    """What a form of these depths is called."""
    return "d" + "-".join(map(str, depths))


def points(names: str, count: int) -> list[dict]:
    """Points in general position: no two features are proportional over them."""
    grid = ((16, 24), (64, 96), (32, 32), (80, 80), (48, 40), (96, 64), (24, 80), (40, 112))
    texts = (96, 32, 224, 160, 64, 288, 128, 32)
    return [
        {"h": h, "w": w, "n": h * w // 4, "t": t if "t" in names else 64}
        for (h, w), t in list(zip(grid, texts, strict=True))[:count]
    ]
