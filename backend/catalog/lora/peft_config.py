"""What a LoRA file says of itself in PEFT's words: `lora_adapter_metadata` in its header, or PEFT's
`adapter_config.json` beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from backend.catalog.formats.read import read_header
from backend.catalog.json_files import read_json
from backend.catalog.lora.keys import is_adapter
from backend.catalog.lora.metadata import is_ours, number, table
from backend.schema.messages import Trouble
from backend.schema.untrusted import is_file

CONFIG = "adapter_config.json"
METADATA = "lora_adapter_metadata"
COMPONENTS = ("transformer", "unet", "text_encoder", "text_encoder_2", "text_encoder_3")
STEMS = ("adapter_model", "pytorch_lora_weights")  # as PEFT and diffusers call the file that the config speaks of
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
MOST_TERMS = 1000
DEFAULT = "R = 1 + 2Q + 2Q^2 + 2Q^3 + Q^4"


def config_beside(path: Path) -> dict:
    """PEFT's adapter_config.json, which speaks of the one LoRA in its folder; {} where there is none, or where several
    files could be meant.

    Raises Trouble("damaged") for one that is no JSON object.
    """
    beside = path.with_name(CONFIG)
    if not is_file(beside) or not (path.name.startswith(STEMS) or not others_beside(path)):
        return {}
    return read_json(beside) or {}


def is_unclear(path: Path) -> bool:
    """Whether an adapter_config.json lies beside `path` and cannot be told to be its own, for other LoRA files lie
    there too."""
    return is_file(path.with_name(CONFIG)) and not path.name.startswith(STEMS) and bool(others_beside(path))


def others_beside(path: Path) -> list[Path]:
    """Other LoRA files in its folder, two at most: more are not looked for. Pickles count by their names alone."""
    found = []
    for other in sorted(path.parent.iterdir()):
        if other.stem == path.stem or other.suffix.lower() not in WEIGHTS:
            continue
        try:
            adapter = other.name.startswith(STEMS) or (
                other.suffix.lower() == ".safetensors" and is_adapter(read_header(other).tensors)
            )
        except Trouble:
            continue
        if adapter:
            found.append(other)
        if len(found) == 2:
            break
    return found


def fields_of(metadata: Mapping[str, str], config: Mapping[str, object]) -> dict[str, dict]:
    """PEFT's fields by component ("dit", "text_encoder", ...; "" for those without any of their own): the header's,
    else the config's."""
    said = table(metadata, METADATA)
    if not said:
        return {"": dict(config)} if config else {}
    found = {}
    for component in COMPONENTS:
        beginning = component + "."
        fields = {key[len(beginning) :]: value for key, value in said.items() if key.startswith(beginning)}
        if fields:
            found["dit" if component in ("transformer", "unet") else component] = fields
    plain = {key: value for key, value in said.items() if "." not in key}
    if plain:
        found[""] = plain
    if len(found) == 1 and "dit" in found:
        found[""] = found["dit"]
    return found


def truth(value: object) -> bool:
    return value is True or str(value).lower() in ("true", "1")


@dataclass(frozen=True)
class Turning:
    """How a block of an OFT file becomes a rotation R of the skew-symmetric Q that it holds.

    `exact`: Cayley's map (1 - Q)(1 + Q)^-1. Else PEFT's Cayley-Neumann series of `terms` terms, which turns the other
    way: 1 + 2Q + 2Q^2 + ... + 2Q^(n-1) + Q^n with n = terms - 1, but at least 3 where there are more than two terms.
    `projected`: each block is first brought within `eps` / sqrt(number of blocks) of 0 (COFT). `said`: by what it is
    known; "" by nothing.
    """

    exact: bool = False
    terms: int = 5
    projected: bool = False
    eps: float = 6e-5
    said: str = ""
    note: str = ""

    def fields(self) -> dict[str, object]:
        """As PEFT's OFTConfig calls them."""
        return {
            "peft_type": "OFT",
            "use_cayley_neumann": not self.exact,
            "num_cayley_neumann_terms": self.terms,
            "coft": self.projected,
            "eps": self.eps,
        }


def turning_of(metadata: Mapping[str, str], config: Mapping[str, object], component: str, name: str) -> Turning:
    """The definition by which the OFT of `component` in the file `name` is to be read.

    PEFT's own fields decide, then OneTrainer's `ot_config`; files that Loft wrote before it said so hold Cayley's map.
    What says nothing is read by the default that PEFT, OneTrainer and ComfyUI share. Raises Trouble("bad_value") for a
    field that has no meaning.
    """
    by_component = fields_of(metadata, config)
    fields = by_component.get(component) or by_component.get("") or {}
    if "use_cayley_neumann" in metadata and not table(metadata, METADATA):  # PEFT's fields one by one in the header
        return _from_fields(metadata, "its metadata", name)
    if "use_cayley_neumann" in fields or str(fields.get("peft_type", "")).upper().endswith("OFT"):
        where = METADATA if table(metadata, METADATA) else CONFIG
        found = _from_fields(fields, where, name)
        return found
    if is_ours(metadata) and metadata.get("algorithm") == "oft":
        return Turning(exact=True, said="metadata")
    if theirs := table(metadata, "ot_config"):
        projected = truth(theirs.get("oft_coft"))
        eps = number(theirs.get("coft_eps")) if projected else None
        return Turning(projected=projected, eps=eps if eps is not None else 6e-5, said="ot_config")
    return Turning(
        note=f"OFT: the file does not say how its rotations are meant; read by the default of PEFT, {DEFAULT}"
    )


def _from_fields(fields: Mapping[str, object], where: str, name: str) -> Turning:
    neumann = fields.get("use_cayley_neumann", True)
    terms, eps = fields.get("num_cayley_neumann_terms", 5), number(fields.get("eps", 6e-5))
    for key in ("use_cayley_neumann", "coft"):
        if str(fields.get(key, False)).lower() not in ("true", "false", "1", "0", "none"):
            raise _meaningless(key, fields[key], where, name)
    count = None if isinstance(terms, bool) else number(terms)
    if count is None or not 1 <= count <= MOST_TERMS or count % 1:
        raise _meaningless("num_cayley_neumann_terms", terms, where, name)
    if eps is None or eps < 0:
        raise _meaningless("eps", fields.get("eps"), where, name)
    old = truth(neumann) and where == CONFIG and not fields.get("peft_version")
    note = "OFT: adapter_config.json names no version of PEFT; before 0.18 the series' last term was meant twice"
    return Turning(not truth(neumann), int(count), truth(fields.get("coft")), eps, where, note if old else "")


def _meaningless(key: str, value: object, where: str, name: str) -> Trouble:
    return Trouble(
        "bad_value",
        f"{name}: {key} in {where} is {str(value)[:60]!r}, which has no meaning for OFT.",
        hint="Correct it there; nothing was changed.",
    )
