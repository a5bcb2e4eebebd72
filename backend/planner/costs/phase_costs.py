"""Bytes and seconds of each phase of a job, in microseconds and without torch, before a byte of weights is there.

Weights are counted exactly (`sizes`); working memory comes from closed forms that were fitted to traced runs
(`assets/memory`, made by `python -m backend trace`); what only a machine can tell (context, libraries' workspaces) is a
stated assumption until it is measured.
"""

from __future__ import annotations

import math

from backend.planner.costs import acceleration_bytes, untraced_model
from backend.planner.costs.device_speed import Speed
from backend.planner.costs.layout import Fixed, Layout, Work, Working
from backend.planner.costs.model_sizes import ModelSizes, PartSizes, published
from backend.schema.memory_plan import DTYPE_BYTES, PhasePlan

POOL = {"least": 1.2, "native": 1.6, "expandable": 1.25}
BASE_DEPTH = 2
TILES_AND_WHOLE = 5.3  # overlapping tiles, rows and the picture that they are joined to, over the picture's own bytes


def evaluate(form: dict, point: dict) -> float:
    """The value of a closed form: the greatest of its sums."""
    return greatest(form["features"], form["pieces"], point)


def greatest(features: list[str], pieces: list, point: dict) -> float:
    """The greatest of sums over products of variables; each letter of a feature is one."""
    values = [math.prod([point[letter] for letter in name if letter != "1"]) for name in features]
    return max(sum([a * b for a, b in zip(piece, values)]) for piece in pieces)


def point_of(sizes: ModelSizes, work: Work) -> dict:
    """The variables of the closed forms: cells, frames, tokens, pictures at once, rank."""
    geometry = sizes.geometry
    h, w = max(2, work.height // geometry["compression"]), max(2, work.width // geometry["compression"])
    f = 1 + (work.frames - 1) // geometry.get("frames_per_latent", 4) if geometry["video"] else 1
    tokens = f * (h // geometry["patch"]) * (w // geometry["patch"])
    multiple = geometry.get("token_multiple", 1)
    tokens = -(-tokens // multiple) * multiple + work.reference_pictures * min(tokens, 4096)
    tokens += work.reference_tokens
    text = -(-work.text_tokens // multiple) * multiple
    passes = work.batch if work.targets else 2 if work.guidance else 1
    pixels = work.width * work.height * (work.frames if geometry["video"] else 1)
    return {
        "h": h,
        "w": w,
        "f": f,
        "n": max(tokens, 1),
        "t": text,
        "q": work.read_tokens or work.text_tokens,
        "v": work.seen_tokens,
        "s": max(tokens, 1) + text,
        "b": passes,
        "r": work.rank,
        "pixels": pixels,
    }


def encoded(point: dict, sizes: ModelSizes, work: Work) -> dict:
    """`point` with the cells of the largest picture that the autoencoder encodes: one to start from, or one to edit."""
    cells = work.reference_pixels // sizes.geometry["compression"] ** 2
    if not cells or ((work.from_picture or work.targets) and point["h"] * point["w"] >= cells):
        return point
    side = math.isqrt(cells)
    return {**point, "h": side, "w": cells / side}


def denoise(part: PartSizes, point: dict, work: Work, fixed: Fixed) -> Working:
    """One pass through the transformer."""
    more = acceleration_bytes.step_cache_bytes(part, point, work.computing) if work.step_cache else 0
    more += acceleration_bytes.products_bytes(part, point) if work.fp8_products else 0
    plain = _denoise(part, point, work, fixed)
    return Working(plain.live + more, plain.least + more, plain.likely + more)


def _denoise(part: PartSizes, point: dict, work: Work, fixed: Fixed) -> Working:
    one, factor = _form(part, f"denoise/{{}}/b{min(point['b'], 2)}", work.computing)
    if one is None:
        return _unknown(part, point, fixed)
    live = evaluate(one, point)
    if point["b"] > 2:
        first, _ = _form(part, "denoise/{}/b1", work.computing)
        assert first is not None, "a table with forms of two prompts has those of one"
        live += (point["b"] - 2) * (live - evaluate(first, point))
    return _working(live * factor, one, fixed)


def step(part: PartSizes, point: dict, work: Work, layout: Layout, fixed: Fixed) -> tuple[Working, int, int]:
    """A training step: its working memory where backward begins and where it ends, and bytes of checkpoints among the
    former."""
    kind = f"step/{work.targets}/{'checkpointed' if layout.checkpointed else 'kept'}/{{}}"
    base = "d" + "-".join(str(BASE_DEPTH) for _ in part.depths)
    form, factor = _form(part, f"{kind}/b1/{base}", work.computing)
    if form is None:
        return _unknown(part, point, fixed), 0, 0
    shallow = [_traced(part, f"{kind}/b{b}/{base}", work.computing, point) for b in (1, 2)]
    live = shallow[0] + (point["b"] - 1) * (shallow[1] - shallow[0])
    ends, kept = live, 0.0
    for index, depth in enumerate(part.depths.values()):
        word = "d" + "-".join(str(BASE_DEPTH + (index == i)) for i in range(len(part.depths)))
        deeper = _traced(part, f"{kind}/b1/{word}", work.computing, point)
        second, _ = _form(part, f"{kind}/b2/{word}", work.computing)
        slope = deeper - shallow[0]
        more = evaluate(second, point) - shallow[1] - slope if second is not None else slope
        kept += (depth - BASE_DEPTH) * (slope + (point["b"] - 1) * more)
    if layout.checkpoints_in_ram:
        return _working(live * factor, form, fixed), int(ends * factor), int(kept * factor)
    working = _working(live * factor, form, fixed)
    whole = int(kept * factor)  # kept tensors lie side by side: no fragments between them
    return Working(working.live + whole, working.least + whole, working.likely + whole), int(ends * factor), whole


def text(part: PartSizes, point: dict, work: Work, fixed: Fixed) -> Working:
    """A prompt through a text encoder, or the pictures that go with it through a vision tower."""
    point = told(part, point)
    bare = "" if fixed.converts or work.computing == "float32" else "_bare"
    form, factor = _form(part, f"text{bare}/{{}}/b1", work.computing)
    if form is None:
        form, factor = _form(part, "text/{}/b1", work.computing)
    return _working(evaluate(form, point) * factor, form, fixed) if form else _unknown(part, {"n": point["t"]}, fixed)


def told(part: PartSizes, point: dict) -> dict:
    """`point` as an encoder of the prompt sees it: with the words around the prompt; a vision tower has the pictures'
    tokens alone."""
    seen = part.kind.endswith("VisionTransformerPretrainedModel")
    return {**point, "t": max(point["v"], 1) if seen else point["q"]}


def decode(
    part: PartSizes, point: dict, dtype: str, fixed: Fixed, *, tiled: bool = False, stage: str = "decode"
) -> Working:
    """Latents to pixels (or, `stage` "encode", back), whole or in tiles."""
    kind = "video" if point["f"] > 1 else "picture"
    bare = "" if fixed.converts or dtype == "float32" else "_bare"
    whole, factor = _form(part, f"{stage}{bare}/{{}}/{kind}", dtype)
    if whole is None:
        found = untraced_model.autoencoder_bytes(
            published()["networks"].get(part.kind, {}),
            part.seen,
            point,
            stage,
            DTYPE_BYTES[dtype],
            converts=fixed.converts,
        )
        return _working(found if found is not None else point["h"] * point["w"] * point["f"] * 2**17, {}, fixed)
    bytes_whole = evaluate(whole, point) * factor
    if tiled and stage == "decode":
        form, times = _form(part, f"decode_tiled/{{}}/{kind}", dtype)
        bytes_tiled = evaluate(form, point) * times if form else bytes_whole
        # the forms are of small pictures, where one tile's work is the most; large ones are most while they are joined
        bytes_tiled = max(bytes_tiled, TILES_AND_WHOLE * 3 * point.get("pixels", 0) * DTYPE_BYTES[dtype])
        if form is not None and bytes_tiled < bytes_whole:
            return _working(bytes_tiled, form, fixed)
    return _working(bytes_whole, whole, fixed)


def operations(part: PartSizes, point: dict, prefix: str = "operations") -> float:
    """Floating-point operations of one pass of one picture through the part."""
    if not part.depths:
        kind = "video" if point.get("f", 1) > 1 else "picture"
        form = part.table.get("forms", {}).get(f"{prefix}/{kind}") or part.table.get("forms", {}).get("operations/d")
        if form is None and part.seen.cell_numel:
            return 2.0 * part.seen.cell_numel * point.get("h", 64) * point.get("w", 64)
        if form is None:
            return 2.0 * part.numel * (point.get("n", 0) + point.get("t", 1))
        cells = point.get("h", 64) * point.get("w", 64)
        # a line through large pictures, whose attention grows with the square, falls below zero at small ones
        return evaluate(form, point) if cells >= 64 * 64 else evaluate(form, {**point, "h": 64, "w": 64}) * cells / 4096
    base = "d" + "-".join(str(BASE_DEPTH) for _ in part.depths)
    forms = part.table.get("forms", {})
    if f"operations/{base}" not in forms:
        tokens = point.get("n", 0) + point.get("t", 0)
        once = sum(
            rows * columns * count
            for name, (rows, columns, count) in part.linears.items()
            if untraced_model.ONCE.search(f"{name}.")
        )
        squares = 4.0 * tokens**2 * acceleration_bytes.width(part) * sum(part.depths.values())
        return 2.0 * (part.numel - once) * tokens + squares
    shallow = evaluate(forms[f"operations/{base}"], point)
    total = shallow
    for index, depth in enumerate(part.depths.values()):
        word = "d" + "-".join(str(BASE_DEPTH + (index == i)) for i in range(len(part.depths)))
        total += (depth - BASE_DEPTH) * (evaluate(forms[f"operations/{word}"], point) - shallow)
    return total


def phase(
    name: str,
    weights: dict[str, int],
    working: Working,
    fixed: Fixed,
    *,
    staging: int = 0,
    adapter: int = 0,
    ram: int = 0,
    seconds: tuple[float, float] = (0.0, 0.0),
    moments: dict[str, int] | None = None,
) -> PhasePlan:
    """The stacked bar of one phase."""
    live = fixed.corrected(sum(weights.values()) + staging + adapter + working.live)
    held = live - working.live + fixed.workspace_bytes
    return PhasePlan(
        name=name,
        weights_bytes=weights,
        working_bytes=working.live,
        adapter_bytes=adapter,
        staging_bytes=staging,
        live_bytes=live,
        peak_low_bytes=max(0, held + working.least + fixed.context_low_bytes),
        peak_high_bytes=max(0, held + working.likely + fixed.context_high_bytes),
        ram_bytes=ram + fixed.ram_bytes,
        seconds=seconds,
        moments=moments or {},
    )


def compute_seconds(flops: float, speed: Speed) -> float:
    """In the middle of the range that `ranged` gives."""
    return flops / speed.flops * (1 + speed.spread) / 2


def ranged(seconds: float, speed: Speed) -> tuple[float, float]:
    """The range around a middle.

    Its ends are in one proportion for every arrangement, so that of two plans the faster is so at both.
    """
    return 2 * seconds / (1 + speed.spread), 2 * seconds * speed.spread / (1 + speed.spread)


def move_seconds(nbytes: float, home: str, speed: Speed) -> float:
    return nbytes / (speed.link_bytes if home == "ram" else min(speed.disk_bytes, speed.link_bytes))


def _traced(part: PartSizes, key: str, dtype: str, point: dict) -> float:
    """Bytes by a form that the table has wherever it has those of the same kind at the base depth."""
    form, _ = _form(part, key, dtype)
    assert form is not None, f"the table of {part.kind} has no {key}"
    return evaluate(form, point)


def _form(part: PartSizes, key: str, dtype: str) -> tuple[dict | None, float]:
    """The closed form for `dtype`, or the nearest one and the factor between them."""
    forms = part.table.get("forms", {})
    wanted = "float32" if dtype == "float32" else "bfloat16"
    if (found := forms.get(key.format(wanted))) is not None:
        return found, 1.0
    other = "bfloat16" if wanted == "float32" else "float32"
    return forms.get(key.format(other)), DTYPE_BYTES[wanted] / DTYPE_BYTES[other]


def _working(live: float, form: dict, fixed: Fixed) -> Working:
    pool = form.get("pool", POOL)
    return Working(int(live), int(live * pool["least"]), int(live * pool[fixed.pool]))


def _unknown(part: PartSizes, point: dict, fixed: Fixed) -> Working:
    """A rough figure for a network that no table knows: its widest block's activations are like its width times the
    tokens."""
    if part.seen.width:  # a UNet
        return _working(point["h"] * point["w"] * point["b"] * part.seen.width * 2 * untraced_model.LEVEL, {}, fixed)
    width = acceleration_bytes.width(part) or math.sqrt(part.numel / 12)
    tokens = (point.get("n", 1) + point.get("t", 0)) * point.get("b", 1)
    return _working(tokens * max(width, 64) * 2 * untraced_model.STREAM, {}, fixed)
