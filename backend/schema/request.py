"""A request for pictures and its answer."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from backend.schema.json_values import finite
from backend.schema.messages import Trouble
from backend.schema.settings import from_values, knob


@dataclass(frozen=True)
class LoraUse:
    """A LoRA file and how strongly it acts."""

    path: str
    strength: float = 1.0


@dataclass(frozen=True)
class GenerationRequest:
    """Everything that determines a picture. Two equal requests give equal pictures on the same machine."""

    model: str = knob("loft/starter", help="Model: an id such as `loft/starter`, a folder, or a file.")
    prompt: str = knob("", help="What the picture shows.", lines=3)
    negative_prompt: str = knob("", help="What to keep away from; needs guidance above 1.", lines=2)
    width: int = knob(128, help="Width in pixels.", low=16, high=8192, step=16, unit="px")
    height: int = knob(128, help="Height in pixels.", low=16, high=8192, step=16, unit="px")
    num_inference_steps: int = knob(12, help="Denoising steps.", low=1, high=200, label="Steps")
    guidance: float = knob(3.0, help="True classifier-free guidance; 1 turns it off.", low=1.0, high=20.0)
    seed: int = knob(0, help="Seed of the first picture; the next ones count up.", low=0, high=2**53 - 1)
    count: int = knob(1, help="Pictures to make.", low=1, high=64)
    loras: tuple[LoraUse, ...] = ()
    input_image: str | None = knob(None, help="Picture to start from (a file).", label="Input picture")
    denoising_strength: float = knob(
        0.75, help="How far to depart from the input picture: 0 keeps it, 1 ignores it.", low=0.0, high=1.0
    )
    edit_images: tuple[str, ...] = knob(
        (),
        help="Pictures that a model that edits works from (files). Some take one, others several, which the prompt "
        "calls "
        "“Picture 1”, “Picture 2” and so on.",
        label="Pictures to edit",
    )
    step_cache: float = knob(
        0.0,
        help="Faster, less exact: steps whose first block changes by at most this share reuse the other blocks of "
        "an earlier step. "
        "0 computes every step; 0.1 is close to the exact picture, 0.3 visibly another.",
        low=0.0,
        high=0.5,
        level="advanced",
    )
    compile: bool = knob(
        False,
        help="Compile the repeated block before the first step (a minute, once a start), for faster steps. The "
        "picture is the same within "
        "rounding. Needs a C++ compiler, on a card Triton.",
        level="advanced",
    )
    fp8_products: bool = knob(
        False,
        help=(
            "Faster, less exact: multiply in 8 bits, on NVIDIA cards of the 40 series or later. Weights are "
            "stored in FP8 for it."
        ),
        level="advanced",
        label="FP8 products",
    )


@dataclass(frozen=True)
class LoraReceipt:
    """What one LoRA did: never nothing in silence."""

    name: str
    path: str = ""
    hash: str = ""  # sha256 of the file
    strength: float = 1.0
    mode: str = "cold"  # "hot" | "cold"
    layers_applied: int = 0
    layers_found: int = 0  # modules the file speaks of
    dialect: str = ""
    unused: dict[str, str] = field(default_factory=dict)  # key or module -> why
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """Pictures (as files) and how they came about."""

    pictures: tuple[str, ...]
    seeds: tuple[int, ...]
    seconds: float
    loras: tuple[LoraReceipt, ...] = ()
    predicted_peak_bytes: int = 0
    measured_peak_bytes: int = 0
    notes: tuple[str, ...] = ()


def request_to_values(request: GenerationRequest) -> dict[str, Any]:
    """`request` as plain values for a line or a file; `request_from_values` reads them."""
    return asdict(request)


def request_from_values(values: dict) -> GenerationRequest:
    """The request in `values`, each checked.

    Raises Trouble for an unknown name, a value of another kind or out of range.
    """
    values = dict(values)
    listed = values.pop("loras", ()) or ()
    if not isinstance(listed, list | tuple):
        raise Trouble("bad_value", f"The LoRAs (loras) are {str(listed)[:80]!r}, which is not a list.")
    return replace(from_values(GenerationRequest, values), loras=tuple(map(_use, listed)))


def _use(item: object) -> LoraUse:
    """One LoRA of a request. Raises Trouble for what is none."""
    path = item.get("path") if isinstance(item, dict) else None
    strength = finite(item.get("strength", 1.0)) if isinstance(item, dict) else None
    if strength is None or not isinstance(path, str):
        words = f"A LoRA of the request is {str(item)[:80]!r}, which is not a file's path and a strength."
        raise Trouble("bad_value", words)
    return LoraUse(path, strength)


def result_from_values(values: dict) -> Result:
    """The inverse of `dataclasses.asdict` for a Result; fields that are unknown here are left out."""
    receipts = tuple(LoraReceipt(**_fields_of(LoraReceipt, item)) for item in values.get("loras", ()))
    return Result(**{**_fields_of(Result, values), "loras": receipts})


def _fields_of(cls: type, values: dict) -> dict:
    known = {item.name for item in fields(cls)}
    return {name: tuple(item) if isinstance(item, list) else item for name, item in values.items() if name in known}
