"""One weight and everything that a file says of it, and how a form answers: what is read, or a refusal that names the
form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from backend.catalog.spec import Packed, TensorAt
from backend.schema.messages import Trouble

FLOATS = ("F64", "F32", "F16", "BF16")
FLOAT8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ")
SCALES = ("weight_scale", "scale_weight")  # ComfyUI's newer and older spelling of one thing
ACTIVATIONS = (  # of a layer's input or output, whose weight does not change by them
    "input_scale",
    "scale_input",
    "output_scale",
    "input_global_scale",
    "input_scale_ub",
)
MARKERS = ("comfy_quant", "weight.comfy_quant")
HINT = "Take the bf16, fp8 or GGUF file of this model instead."


@dataclass(frozen=True)
class Evidence:
    """What a file, and a config.json beside it, says of all its weights together."""

    method: str = ""  # of a quantization_config: "modelopt", "sdnq", "torchao", ...
    config: Mapping = field(default_factory=dict)
    broken: str = ""  # what cannot be understood of it, in words
    stray_marker: str = ""  # a marker that belongs to no weight
    stray_factor: str = ""  # a factor that belongs to no weight
    layerwise: bool = False  # the header names formats of layers
    marked_int8: bool = False  # INT8 weights have markers, which alone say whether one is rotated


@dataclass(frozen=True)
class Layer:
    """A module's stored tensors by role ("weight", "weight_scale", "weight.absmax", "_weight_qdata"), and what is said
    of it."""

    module: str
    tensors: Mapping[str, TensorAt]
    entry: Mapping  # of ComfyUI's markers, flattened; empty where there is none
    torchao: Mapping  # of torchao's header; empty where there is none
    scaled: str | None  # dtype of the `scaled_fp8` marker that covers it
    about: Evidence

    @property
    def name(self) -> str:
        return f"{self.module}.weight" if self.module else "weight"

    @property
    def weight(self) -> TensorAt | None:
        return self.tensors.get("weight")

    @property
    def stored(self) -> TensorAt:
        """`weight`, of a layer that is known to have one: every form checks that before it looks at dtype and shape."""
        return self.tensors["weight"]

    @property
    def file(self) -> str:
        return next(iter(self.tensors.values())).file.name

    def has(self, *roles: str) -> bool:
        return any(role in self.tensors for role in roles)

    def excluded(self) -> bool:
        """Whether a quantization_config leaves this module as it was."""
        kept = self.about.config.get("modules_to_not_convert") or self.about.config.get("exclude_modules") or ()
        if not isinstance(kept, list):
            return False
        return any(isinstance(one, str) and one and f".{self.module}.".find(f".{one}.") >= 0 for one in kept)


@dataclass(frozen=True)
class Decision:
    """How a layer's weight is read: the tensor (with `packed`, where its numbers are made), the factor of plain scaled
    codes, and other parameters that the same stored tensors make ("name" -> tensor)."""

    at: TensorAt | None
    scale: TensorAt | None = None
    used: frozenset[str] = frozenset()
    others: Mapping[str, TensorAt] = field(default_factory=dict)


def refusal(layer: Layer, what: str) -> Trouble:
    """The Trouble of a weight that is stored as `what`."""
    return Trouble("not_supported", f"{layer.file} stores {layer.name} as {what}.", hint=HINT)


def not_read(layer: Layer, title: str) -> Trouble:
    return refusal(layer, f"{title}, a form that is not read")


def packed(
    layer: Layer,
    form: str,
    title: str,
    roles: Mapping[str, str],
    shape: tuple[int, ...],
    settings: Mapping[str, object] | None = None,
    *,
    also: Iterable[str] = (),
    name: str | None = None,
) -> Decision:
    """The decision to dequantize: `roles` role in the form -> role in the file; `also` are roles that are understood
    and not needed."""
    pieces = tuple((role, layer.tensors[stored]) for role, stored in roles.items())
    first = pieces[0][1]
    at = TensorAt(
        first.file,
        first.key,
        title,
        tuple(shape),
        first.start,
        first.end,
        packed=Packed(form, pieces, tuple(sorted((settings or {}).items())), tuple(shape)),
    )
    return Decision(at, used=frozenset((*roles.values(), *also)))


def is_single(shape: tuple[int, ...]) -> bool:
    """Whether a factor of that shape is one number."""
    return math.prod(shape) == 1


def check_roles(layer: Layer, title: str, needed: Iterable[str]) -> None:
    """Raises Trouble where one of the tensors that the form is made of is missing."""
    for role in needed:
        if role not in layer.tensors:
            raise refusal(layer, f"{title}, but its {role} is missing")


def check_tensor(layer: Layer, title: str, role: str, dtypes: Iterable[str], *shapes: tuple[int, ...]) -> None:
    """Raises Trouble where the tensor `role` has another dtype or none of `shapes` (no shapes: any)."""
    at = layer.tensors[role]
    if at.dtype not in tuple(dtypes) or (shapes and tuple(at.shape) not in shapes):
        raise refusal(layer, f"{title}, but its {role} is {at.dtype} {list(at.shape)}, which does not fit")
