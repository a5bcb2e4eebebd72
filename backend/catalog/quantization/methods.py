"""Methods that store the weights of linear layers in 8 or 4 bits: the one table of what each is called, who carries it
out, what a layer takes, and whether a LoRA can learn beside it. No torch, and none of those packages.

The names are DiffSynth-Studio's (`w8a16`: 8-bit weights, 16-bit activations). The planner counts by this table, command
lines and `QuantizeConfig` take its names, and `engine.quantization` holds the functions of each. A part's storage is
written as "bitsandbytes_nf4", "int8/img_in,proj_out" with the ends of names of layers that stay as they are,
"int8=to_q" with those of layers that are meant alone, or several of these joined by "+" (`read_storage`). Checked
against real layers (`tests/engine/quantization/test_quantized_layers.py`): bitsandbytes 0.50, torchao 0.18,
comfy-kitchen 0.2.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from backend.schema.messages import Trouble
from backend.system.text_files import listed

BLOCK = 64  # numbers that share a factor in bitsandbytes' 4 bits; factors are quantized themselves, in blocks of 256
GROUP = 128  # of torchao's 4 bits
PIP_NAMES = {"comfy_kitchen": "comfy-kitchen"}


@dataclass(frozen=True)
class Method:
    """`layer_bytes(rows, columns, wide)`: of a layer's weight, `wide` being the bytes of a number that computes.

    `activations`: inputs are quantized too. `gradients`: they pass through the layer. `keeps_weight`: autograd keeps
    the full weight of each layer until its backward pass.
    """

    package: str  # that is imported; "" for Loft's own
    title: str
    layer_bytes: Callable[[int, int, int], int]
    activations: bool = False
    gradients: bool = True
    keeps_weight: bool = False


def _four_bits(rows: int, columns: int, wide: int) -> int:
    """Half a byte a number, a byte a block, a float32 for 256 blocks, and tables: 16 and 256 float32, an offset."""
    blocks = -(-rows * columns // BLOCK)
    return -(-rows * columns // 2) + blocks + 4 * -(-blocks // 256) + 4 * (16 + 256 + 1)


def _four_bits_in_groups(rows: int, columns: int, wide: int) -> int:
    return rows * columns // 2 + 2 * 2 * rows * -(-columns // GROUP)  # a factor and a zero point of 16 bits each


def _bytes_and(per_row: int, once: int = 0) -> Callable[[int, int, int], int]:
    return lambda rows, columns, wide: rows * columns + per_row * rows + once


def _nvfp4(rows: int, columns: int, wide: int) -> int:
    return rows * columns // 2 + _block_factors(rows, columns, 16) + 4


def _block_factors(rows: int, columns: int, block: int) -> int:
    """Bytes of the factors of blocks of a row, as tensor cores read them: rows in groups of 128, blocks in groups of
    4."""
    return 128 * -(-rows // 128) * 4 * -(-columns // (4 * block))


METHODS: dict[str, Method] = {
    "int8": Method("", "INT8 by row", lambda rows, columns, wide: rows * columns + wide * rows),
    "bitsandbytes_nf4": Method("bitsandbytes", "NF4", _four_bits),
    "bitsandbytes_fp4": Method("bitsandbytes", "FP4", _four_bits),
    "bitsandbytes_int8": Method("bitsandbytes", "LLM.int8()", _bytes_and(4), activations=True),
    "torchao_int8_w8a16": Method("torchao", "INT8", _bytes_and(5), keeps_weight=True),
    "torchao_fp8_w8a16": Method("torchao", "FP8", _bytes_and(4), keeps_weight=True),
    "torchao_int4_w4a16": Method("torchao", "INT4", _four_bits_in_groups, gradients=False),
    "torchao_nvfp4_w4a16": Method("torchao", "NVFP4", _nvfp4, keeps_weight=True),
    "torchao_int8_w8a8": Method("torchao", "INT8, INT8 inputs", _bytes_and(5), activations=True, gradients=False),
    "torchao_fp8_w8a8": Method("torchao", "FP8, FP8 inputs", _bytes_and(4), activations=True, gradients=False),
    # These need a card of their own kind (NVIDIA's Hopper or Blackwell); their bytes are by the formats' definitions,
    # not measured.
    "torchao_nvfp4_w4a4": Method("torchao", "NVFP4, NVFP4 inputs", _nvfp4, activations=True, gradients=False),
    "torchao_mxfp4_w4a4": Method(
        "torchao",
        "MXFP4, MXFP4 inputs",
        lambda rows, columns, wide: rows * columns // 2 + _block_factors(rows, columns, 32),
        activations=True,
        gradients=False,
    ),
    "torchao_mxfp8_w8a8": Method(
        "torchao",
        "MXFP8, MXFP8 inputs",
        lambda rows, columns, wide: rows * columns + _block_factors(rows, columns, 32),
        activations=True,
        gradients=False,
    ),
    "torchao_int4_w4a8": Method("torchao", "INT4, FP8 inputs", _four_bits_in_groups, activations=True, gradients=False),
    "comfy_kitchen_int8_w8a8": Method("comfy_kitchen", "INT8, INT8 inputs", _bytes_and(4), activations=True),
    "comfy_kitchen_fp8_w8a8": Method("comfy_kitchen", "FP8, FP8 inputs", _bytes_and(0, 4), activations=True),
}


@dataclass(frozen=True)
class Rule:
    """Layers of a part, by the ends of their names, and the method that quantizes them."""

    method: str
    excluded: tuple[str, ...] = ()
    targets: tuple[str, ...] | None = None  # None: all


def read_storage(storage: str) -> tuple[Rule, ...]:
    """The rules that a part's storage names; none for a dtype."""
    found = []
    for piece in storage.split("+") if is_quantized(storage) else ():
        piece, _, excluded = piece.partition("/")
        method, only, targets = piece.partition("=")
        found.append(Rule(method, listed(excluded), listed(targets) if only else None))
    return tuple(found)


def write_storage(rules: Iterable[Rule]) -> str:
    """The inverse of `read_storage`."""

    def words(rule: Rule) -> str:
        targets = "" if rule.targets is None else f"={','.join(rule.targets)}"
        excluded = f"/{','.join(rule.excluded)}" if rule.excluded else ""
        return f"{rule.method}{targets}{excluded}"

    return "+".join(map(words, rules))


def is_quantized(storage: str) -> bool:
    """Whether `storage` is a method's, and no dtype."""
    return re.split(r"[/=+]", storage, maxsplit=1)[0] in METHODS


def check_method(name: str, setting: str) -> None:
    """Raises Trouble in the name of `setting` for a method that is not known, and for one whose package is not
    installed."""
    if name not in METHODS:
        raise Trouble(
            "bad_value",
            f"There is no quantization method {name!r:.80} ({setting}).",
            hint=f"There are {', '.join(METHODS)}.",
        )


def check_package(name: str, setting: str) -> None:
    """Raises Trouble("missing_package") where the method's package is not installed."""
    package = METHODS[name].package
    if package and importlib.util.find_spec(package) is None:
        pip = PIP_NAMES.get(package, package)
        raise Trouble(
            "missing_package",
            f"The quantization {name} ({setting}) needs the package {pip}, which is not installed.",
            hint=f"pip install {pip}; or use int8, which needs none.",
        )
