"""Which closed forms a job is answered by, and which of them no table has: what the tracer is to find out first, and
where the figure is a guess.

Names of forms are those of `backend.engine.tracing.trace` and `backend.engine.tracing.cpu_training_fit`.
"""

from __future__ import annotations

from backend.planner.costs.layout import DENOISERS, Layout, Work
from backend.planner.costs.model_sizes import ModelSizes, PartSizes, published
from backend.planner.costs.phase_costs import BASE_DEPTH
from backend.planner.costs.training_method import method_of


def step_names(part: PartSizes, point: dict, work: Work, layout: Layout) -> tuple[str, ...]:
    """Forms of a step on a CPU, the right one first, then what comes near."""
    kernel = kernel_of(part, point)
    kept = "checkpointed" if layout.checkpointed or layout.checkpoints_in_ram else "kept"
    names = [f"{work.targets}{_at(work.method)}", f"usual{_at(work.method)}"] if work.targets != "full" else ["full"]
    if work.targets == "full" and work.method:
        names = [f"full{_at(work.method)}", "full"]
    if work.method:
        names += [work.targets, "usual"]
    return tuple(dict.fromkeys(f"{kernel}/{name}/{kept}/{_dtype(work)}" for name in (*names, "usual")))


def sample_names(part: PartSizes, step: dict, work: Work) -> tuple[str, ...]:
    """The same of a sample between steps.

    Drawing takes one step at a time, whatever is learnt; the attention is that of the run's step.
    """
    kernel = kernel_of(part, step)
    word = work.method.partition("+")[0]
    word = "" if word == "lora" else word
    names = ["full"] if work.targets == "full" else [f"usual{_at(word)}", "usual"]
    return tuple(dict.fromkeys(f"{kernel}/sample/{name}/{_dtype(work)}" for name in names))


def kernel_of(part: PartSizes, point: dict) -> str:
    """Which attention a run on a CPU computes with: matrix products for short sequences, torch's own for long ones."""
    most = part.table.get("cpu", {}).get("plain_tokens", _known(part).get("plain_tokens", 0))
    return "plain" if point["n"] <= most else "fused"


def _known(part: PartSizes) -> dict:
    return published()["networks"].get(part.kind, {})


def _at(word: str) -> str:
    return f"@{word}" if word else ""


def _dtype(work: Work) -> str:
    return "float32" if work.computing == "float32" else "bfloat16"


def missing(sizes: ModelSizes, work: Work, layout: Layout, point: dict, *, on_cpu: bool) -> dict[str, list[str]]:
    """Part -> forms that `work` needs and no table has, as far as tracing can find them.

    A part without any table is there with no name at all: its other forms come with the first.
    """
    found: dict[str, list[str]] = {}
    for name, part in sizes.parts.items():
        failed = part.table.get("failed", ())
        wanted = [one for one in _wanted(name, part, sizes, work, layout, point, on_cpu=on_cpu) if one not in failed]
        if wanted or (not part.table and part.kind in published()["networks"]):
            found[name] = wanted
    return found


def is_guess(sizes: ModelSizes, work: Work, layout: Layout, point: dict, *, on_cpu: bool) -> bool:
    """Whether a figure for `work` rests on something that is known of no such network or job."""
    if any(not part.table for part in sizes.parts.values()) or work.unknown_optimizer:
        return True
    if work.targets and any(name not in DENOISERS for name in work.trained):
        return True  # what the step keeps of an encoder that trains is in no form
    method = method_of(work.method)
    if (not method.lean or method.drawing) and not (on_cpu and "plain_tokens" in _known(sizes.parts["dit"])):
        return True  # on a card all methods are counted as a plain LoRA, or as whole weights
    return any(_wanted(name, part, sizes, work, layout, point, on_cpu=on_cpu) for name, part in sizes.parts.items())


def _wanted(
    name: str, part: PartSizes, sizes: ModelSizes, work: Work, layout: Layout, point: dict, *, on_cpu: bool
) -> list[str]:
    forms, cpu = part.table.get("forms", {}), part.table.get("cpu", {})
    known = _known(part)
    if not known:
        return []
    if name == "vae":
        kinds = ["decode"] if not work.targets or work.samples else []
        kinds += ["encode"] if work.targets or work.encodes else []
        dtype = "float32" if work.decoder_dtype == "float32" else "bfloat16"
        shape = "video" if point["f"] > 1 else "picture"
        return [f"{kind}/{dtype}/{shape}" for kind in kinds if f"{kind}/{dtype}/{shape}" not in forms]
    if name not in DENOISERS:
        return [f"text/{_dtype(work)}/b1"] if f"text/{_dtype(work)}/b1" not in forms and forms else []
    wanted = []
    if not work.targets:
        key = f"denoise/{_dtype(work)}/b1"
        return [key] if key not in forms else []
    if "lora" not in known:
        return []
    if on_cpu and "plain_tokens" in known:
        if name in work.trained:
            wanted.append(step_names(part, point, work, layout)[0])
            if work.samples:
                wanted.append(sample_names(part, point, work)[0])
        return [one for one in wanted if one not in cpu]
    if method_of(work.method).lean:
        kept = "checkpointed" if layout.checkpointed or layout.checkpoints_in_ram else "kept"
        base = "d" + "-".join(str(BASE_DEPTH) for _ in known["blocks"])
        key = f"step/{work.targets}/{kept}/{_dtype(work)}/b1/{base}"
        bf16 = f"step/{work.targets}/{kept}/bfloat16/b1/{base}"  # of a published network; twice that in float32
        return [] if key in forms or (bf16 in forms and sizes.published) else [key]
    return []
