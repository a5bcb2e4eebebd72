"""Working memory of a network as closed forms: `python -m backend trace FAMILY` writes `assets/memory/FAMILY.json`.

A network is built at two shallow depths on fake tensors: bytes are exactly affine in depth, in pictures that go through
together, and piecewise affine in tokens, so four small networks answer for every depth, size and batch. Sizes and
configurations of published models are facts in `assets/memory/published.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from backend.engine.tracing import cpu_training_fit, fit, forward_calls, sample_points, training_fit, vision_fit
from backend.engine.tracing.allocation_recorder import Tape, fakes
from backend.families import of_network
from backend.planner.costs.model_sizes import fingerprint
from backend.schema.paths import ASSETS
from backend.system.atomic_files import write_text

MEMORY = ASSETS / "memory"
STARTER = "starter"  # the model in assets/starter, among the names of families
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CELLS = {"h": (8, 512), "w": (8, 512)}


def published() -> dict:
    """Networks and models that the estimate knows by name."""
    return json.loads((MEMORY / "published.json").read_text(encoding="utf-8"))


def table(
    network: str,
    config: dict,
    *,
    facts: dict,
    dtypes: tuple[str, ...] = ("bfloat16",),
    like: dict | None = None,
    cpu: bool = False,
) -> dict:
    """Sizes and closed forms of one network. `facts`: the `networks` of `published`. `like`: the table of a network
    that trains with the same bytes, whose forms of a training step are taken over. `cpu`: also the forms of a run on a
    CPU."""
    kind = network.rpartition(":")[2]
    known = facts.get(kind)
    if known is None:
        raise ValueError(f"There is no rule for tracing {kind}; known are {', '.join(sorted(facts))}.")
    found = {"network": kind, **_sizes(network, config, known), "forms": {}}
    if "lora" in known:
        found["tables"] = _table_bytes(network, config, known)
    for name in dtypes:
        if "lora" in known and like is None:
            found["forms"] |= _denoiser(network, config, known, DTYPES[name], name, trained=True)
        else:
            found["forms"] |= forms_of(network, config, known, name)
    if cpu and "plain_tokens" in known:
        *_, found["cpu"] = cpu_tables(network, config, known, dtypes=dtypes)
    if like is not None:
        found["forms"] |= {key: form for key, form in like["forms"].items() if key.startswith("step/")}
    return found


def bare(network: str, config: dict, *, facts: dict) -> dict:
    """A table of one network without forms, to take some up that a shipped table lacks."""
    kind = network.rpartition(":")[2]
    return {"network": kind, **_sizes(network, config, facts[kind]), "forms": {}}


def forms_of(network: str, config: dict, known: dict, name: str) -> dict:
    """Closed forms of one network in the dtype called `name`; of a transformer those of its pass alone."""
    kind, dtype = network.rpartition(":")[2], DTYPES[name]
    if "lora" in known:
        return _denoiser(network, config, known, dtype, name, trained=False)
    if kind.startswith("Autoencoder"):
        return _autoencoder(network, config, known, dtype, name)
    owner = of_network(kind)
    if owner is not None and owner[0].PARTS[owner[1]].for_pictures:
        return vision_fit.forms_of(network, config, known, dtype, name)
    return _encoder(network, config, known, dtype, name)


def cpu_tables(network: str, config: dict, known: dict, *, dtypes: tuple[str, ...]) -> Iterator[dict]:
    """Forms of a run on a CPU, and up to how many tokens of a picture it computes attention in plain matrix products.
    Each gives more."""
    found = {"plain_tokens": known["plain_tokens"]}
    for name in dtypes:
        for key, form in cpu_training_fit.forms_of(network, config, known, DTYPES[name], name):
            found = {**found, key: form}
            yield found


def _sizes(network: str, config: dict, known: dict) -> dict:
    with fakes():
        module = forward_calls.build(
            network, sample_points.config_of(config, known, (1,) * len(known["blocks"])), torch.bfloat16
        )
        linears = {
            name: tuple(part.weight.shape) for name, part in module.named_modules() if isinstance(part, torch.nn.Linear)
        }
        stored = module.state_dict()
        # a tied weight is stored once
        weights = {
            name: stored[name] for name, _ in (*module.named_parameters(), *module.named_buffers()) if name in stored
        }
    inner_names = _names_of_later_blocks(network, config, known)
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    flags = tuple(flag for flag in known.get("flags", ()) if config.get(flag))
    sizes = {"": {"rest": 0, "matrix": 0, "precise": 0, "linears": {}}} | {
        name: {"rest": 0, "matrix": 0, "precise": 0, "linears": {}} for name in known["blocks"]
    }
    for name, weight in weights.items():
        home = next((block for block in known["blocks"] if name.startswith(f"{block}.0.")), "")
        inner = name.removeprefix(f"{home}.0.") if home else name
        owner = inner.rpartition(".")[0]
        matrix = name.rpartition(".")[0] in linears and weight.ndim == 2
        key = "precise" if weight.dtype == torch.float32 else "matrix" if matrix else "rest"
        where = sizes[home]
        if home and inner not in inner_names[home]:  # T5's table of relative positions
            where = where.setdefault("first", {"rest": 0, "matrix": 0, "precise": 0})
        where[key] += weight.numel()
        if matrix:
            sizes[home]["linears"][owner] = list(weight.shape)
    return {
        "key": fingerprint(network.partition(":")[2], shapes, tuple(known["blocks"]), flags),
        "configs": [config],
        "blocks": known["blocks"],
        "numel": sizes,
    }


def _names_of_later_blocks(network: str, config: dict, known: dict) -> dict[str, set[str]]:
    """Of each list of blocks, the names that the blocks after the first have: some networks have more in the first."""
    with fakes():
        config = sample_points.config_of(config, known, (2,) * len(known["blocks"]))
        names = forward_calls.build(network, config, torch.bfloat16).state_dict()
    return {
        block: {name.removeprefix(f"{block}.1.") for name in names if name.startswith(f"{block}.1.")}
        for block in known["blocks"]
    }


def _table_bytes(network: str, config: dict, known: dict) -> int:
    """Bytes that stay on the device beside the stored weights once the network has run."""
    with fakes():
        module = forward_calls.build(
            network, sample_points.config_of(config, known, (1,) * len(known["blocks"])), torch.bfloat16
        )
        with torch.no_grad():
            forward_calls.predict(module, {"h": 16, "w": 16, "t": 32, "n": 64}, torch.bfloat16)
        stored = module.state_dict()
        buffers = [buffer for name, buffer in module.named_buffers() if name not in stored]
        return sum(one.nbytes for one in (*buffers, *forward_calls.tables(module)))


def _tapes(call, module, points: list[dict], dtype: torch.dtype, *, warm: bool = True) -> list[Tape]:
    return [forward_calls.trace(module, lambda _, at=point: call(module, at, dtype), warm=warm) for point in points]


def _denoiser(network: str, config: dict, known: dict, dtype: torch.dtype, name: str, *, trained: bool) -> dict:
    texts = texts_of(known)
    span = {key: sample_points.TOKENS[key] for key in ("n", *texts)}
    names, quadratic = ["1", "n", *texts], ["nn", "nt", "tt"] if texts else ["nn"]
    found = {}
    for depths in sample_points.depths_of(known):
        with fakes():
            module = forward_calls.build(network, sample_points.config_of(config, known, depths), dtype)
            for batch in (1, 2) if depths == sample_points.depths_of(known)[0] else (1,):
                points = [
                    {**point, "b": batch}
                    for point in sample_points.points(texts, len(names + quadratic) + 1 if batch == 1 else 4)
                ]
                tapes = _tapes(forward_calls.predict, module, points, dtype)
                if depths == sample_points.depths_of(known)[0]:
                    form = fit.fit(names, points, tapes, span)
                    found[f"denoise/{name}/b{batch}"] = form | {"pool": fit.pools(tapes[1:2])}
                if batch == 1:
                    counts = [tape.linear_flops + tape.attention_flops for tape in tapes]
                    found[f"operations/{sample_points.word(depths)}"] = fit.fit_operations(
                        [*names, *quadratic], points, counts
                    )
    for targets in (*known["lora"], "full") if trained else ():
        for checkpointed in (True, False):
            found |= training_fit.forms_of(network, config, known, dtype, name, targets, checkpointed, texts)
    return found


def _autoencoder(network: str, config: dict, known: dict, dtype: torch.dtype, name: str) -> dict:
    video = known.get("video", False)
    names = ["1", "h", "w", "hw"]
    found = {}
    with fakes():
        module = forward_calls.build(network, config, dtype)
        for stage, call in (("decode", forward_calls.decode), ("encode", forward_calls.encode_image)):
            for frames in ("1", "f") if video else ("1",):
                points = [
                    dict(point, f=f)
                    for f in ((1,) if frames == "1" else (3, 5))
                    for point in sample_points.points("", 6)
                ]
                wanted = names if frames == "1" else [*names, "f", "fh", "fw", "fhw"]
                kind = "picture" if frames == "1" else "video"
                tapes = _tapes(call, module, points, dtype)
                found[f"{stage}/{name}/{kind}"] = _cells_form(wanted, points, tapes) | {"pool": fit.pools(tapes[3:4])}
                if dtype != torch.float32:
                    bare = [tape.outside() for tape in tapes]
                    found[f"{stage}_bare/{name}/{kind}"] = _cells_form(wanted, points, bare) | {
                        "pool": fit.pools(bare[3:4])
                    }
                counts = [tape.linear_flops + tape.attention_flops for tape in tapes]
                found[f"operations/{stage}/{kind}"] = fit.fit_operations(
                    ["1", "hw"] if frames == "1" else ["1", "hw", "fhw"], points, counts
                )
        if name == "bfloat16":
            found |= _tiled(module, dtype, name, video)
    return found


def _cells_form(names, points, tapes) -> dict:
    if len({len(tape.events) for tape in tapes}) == 1 and len(names) == 4:
        return fit.fit(names, points, tapes, CELLS)
    return fit.fit_peaks(names, points, tapes)


def _tiled(module, dtype: torch.dtype, name: str, video: bool) -> dict:
    found, sides = (
        {},
        (72, 96) if forward_calls.pixels_per_cell(module) == 8 else (40, 56),
    )  # blending tiles is slow to trace
    for kind in ("picture", "video") if video else ("picture",):
        points = [{"h": side, "w": side, "f": f} for f in ((1,) if kind == "picture" else (3, 5)) for side in sides]
        tapes = _tapes(partial(forward_calls.decode, tiled=True), module, points, dtype, warm=False)
        names = ["1", "hw"] if kind == "picture" else ["1", "f", "fhw"]
        found[f"decode_tiled/{name}/{kind}"] = fit.fit_peaks(names, points, tapes) | {"pool": fit.pools(tapes[:1])}
    return found


def _encoder(network: str, config: dict, known: dict, dtype: torch.dtype, name: str) -> dict:
    found = {}
    for depths in sample_points.depths_of(known) if known["blocks"] else [()]:
        with fakes():
            module = forward_calls.build(network, sample_points.config_of(config, known, depths), dtype)
            fixed = network.partition(":")[2].startswith("CLIP")
            for batch in (1, 2):
                points = [{"t": t, "b": batch} for t in (64, 96, 224, 512)]
                tapes = _tapes(forward_calls.encode_text, module, points, dtype)
                names = ["1"] if fixed else ["1", "t", "tt"]
                if depths == sample_points.depths_of(known)[0] or not known["blocks"]:
                    form = fit.fit(names, points, tapes, {"t": sample_points.TOKENS["t"]})
                    found[f"text/{name}/b{batch}"] = form | {"pool": fit.pools(tapes[2:])}
                if batch == 1:
                    counts = [tape.linear_flops + tape.attention_flops for tape in tapes]
                    found[f"operations/{sample_points.word(depths)}"] = fit.fit_operations(names, points, counts)
    return found


def texts_of(known: dict) -> str:
    """The letters of text in a transformer's points: none where every prompt is as long."""
    return "" if known.get("fixed_text") else "t"


def write_family(family: str) -> Path:
    """Traces every network of `family` and writes its file; returns where. "starter" is the model in
    `assets/starter`."""
    known = published()
    tables: dict[str, dict] = {}
    for network, config, dtypes, like in _starter(known) if family == STARTER else _networks(known, family):
        word = json.dumps([network, config], sort_keys=True)
        if word not in tables:
            print(network, file=sys.stderr, flush=True)
            other = tables.get(json.dumps([network, like], sort_keys=True)) if like else None
            tables[word] = table(
                network, config, facts=known["networks"], dtypes=dtypes, like=other, cpu=family == STARTER
            )
    return write(MEMORY / f"{family}.json", tables.values())


def _networks(known: dict, family: str):
    variants = known["families"][family]["variants"]
    for variant in variants.values():
        for name, part in variant["parts"].items():
            like = variants[part["trains_like"]]["parts"][name]["config"] if "trains_like" in part else None
            yield part["network"], part["config"], tuple(DTYPES) if name == "vae" else ("bfloat16",), like


def _starter(known: dict):
    for part in known["starter"].values():
        config = json.loads((ASSETS / "starter" / part["folder"] / "config.json").read_text(encoding="utf-8"))
        config = config.get(part.get("config_key", ""), config)
        yield (
            part["network"],
            {key: value for key, value in config.items() if not key.startswith("_")},
            tuple(DTYPES),
            None,
        )


def write(path: Path, tables) -> Path:
    merged: dict[str, dict] = {}
    for one in tables:
        if one["key"] in merged:
            merged[one["key"]]["configs"] += one["configs"]
        merged.setdefault(one["key"], one)
    lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in merged.values())
    write_text(path, f'{{"torch": "{torch.__version__.partition("+")[0]}", "tables": [\n{lines}\n]}}\n')
    return path


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m backend trace", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("family", nargs="+", help="families of assets/memory/published.json, or starter")
    arguments = parser.parse_args(argv)
    for family in arguments.family:
        print(write_family(family))


if __name__ == "__main__":
    main()
