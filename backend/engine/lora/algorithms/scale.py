"""LoRA scale alpha / rank: alpha from its tensor, else from metadata; rank from the tensors alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from backend.catalog.lora.alpha import AlphaRules, truth
from backend.catalog.lora.metadata import number
from backend.engine.loading.tensor_source import Source
from backend.schema.json_values import parse_json
from backend.schema.messages import Trouble


def scale_of(
    source: Source,
    roles: Mapping[str, str],
    rank: int | None,
    rules: AlphaRules,
    names: Sequence[str],
    component: str,
    notes: list[str],
) -> float:
    """The factor of the change of a module known by `names`: alpha / rank. The alpha tensor, if there is one, is nearer
    evidence than metadata.

    `rank` None: two whole Kronecker factors, where an alpha tensor means nothing and metadata only if it gives a rank
    too.

    Raises Trouble("not_finite") for an alpha that is NaN or infinite.
    """
    key = roles.get("alpha")
    if key is None or rank is None:
        return rules.scale(names, component, rank)
    alpha = alpha_value(source, key)
    if not math.isfinite(alpha):
        raise Trouble("not_finite", f"{source.name}: alpha of {names[0]} is {alpha}.", hint="The file is damaged.")
    if alpha == 0.0:
        notes.append(f"alpha of {names[0]} is 0, so it does nothing")
    return alpha / rank


def alpha_value(source: Source, key: str) -> float:
    """The number in an alpha tensor of any dtype and of shape [] or [1]."""
    tensor = source.read_stored(key)
    if tensor.numel() != 1:
        raise Trouble("shape_mismatch", f"{source.name}: {key} has {tensor.numel()} elements; an alpha is one number.")
    return float(tensor.double() if tensor.is_floating_point() else tensor)


def warnings(source: Source, ranks: set[int], alphas: set[float]) -> list[str]:
    """What is suspicious about a file's alphas and cannot be decided from the file."""
    found = []
    dim = number(source.metadata.get("ss_network_dim"))
    if len(ranks) > 1 and len(alphas) == 1 and dim is not None and any(rank != dim for rank in ranks):
        found.append("all modules share one alpha though their ranks differ: some may act too strongly")
    arguments = source.metadata.get("ss_network_args", "")
    if "split_qkv" in arguments and truth(_arguments(arguments).get("split_qkv")):
        found.append("trained with split_qkv: such files often store a third of the trained strength")
    return found


def _arguments(text: str) -> dict:
    try:
        value = parse_json(text[:1_000_000])
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
