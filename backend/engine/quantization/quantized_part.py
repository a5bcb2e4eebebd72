"""A part of a model loaded with quantized layers: quantized while it is loaded, or read from a file that holds them quantized."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from backend.catalog.formats.read import read_header
from backend.catalog.spec import PartSpec, TensorAt
from backend.engine.devices import device_memory
from backend.engine.loading import load
from backend.engine.quantization.config import MixedQuantizeConfig, QuantizeConfig, replace_layer
from backend.engine.quantization.layers import dequantized
from backend.schema.messages import Trouble

Config = QuantizeConfig | MixedQuantizeConfig


def load_quantized(
    part: PartSpec,
    config: Config,
    *,
    dtype: torch.dtype,
    device: torch.device,
    stay: torch.device | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
    before: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """The network of `part` with the layers that `config` means quantized; all else in `dtype`. In eval mode, without gradients.

    Layers go to `device` and are quantized there one by one, so a part is never there in full; quantized ones `stay` there, or where that
    says. `before` is called with the part in full,
    in RAM (a LoRA is merged into it). Raises Trouble.
    """
    if config.load_prequantized:
        return _load_prequantized(part, config, dtype=dtype, device=device, on_bytes=on_bytes)
    private = before is not None or device_memory.is_ram(device)
    maps = load.open_maps(part.files, private=private)
    module = load.load_part(part, dtype=dtype, device="cpu", on_bytes=on_bytes, maps=maps)
    if before:
        before(module)
    return quantize_loaded(module, config, part=part, maps=maps, device=device, stay=stay)


def quantize_loaded(
    module: nn.Module,
    config: Config,
    *,
    part: PartSpec,
    maps: Mapping[Path, mmap.mmap],
    device: torch.device,
    stay: torch.device | None = None,
) -> nn.Module:
    """Quantizes the linear layers of `module` in place, each brought to `device` by itself, and then brings the rest there (or where
    all `stay`).

    `maps` are those that the module was loaded from: the pages of a layer that was quantized are let go.
    """
    for name, one in config.chosen(module).items():
        layer = module.get_submodule(name).to(device)
        dtype = layer.weight.dtype
        made = one.quantized(layer, f"{part.name}.{name}")
        made = dequantized(made, dtype) if one.mode == "dequant_once" else made
        replace_layer(module, name, made if stay is None else made.to(stay))
        at = part.tensors.get(f"{name}.weight")
        if at is not None and at.packed is None:
            load.drop_pages(at, maps[at.file])
    device_memory.empty_cache("cpu")
    return module.to(stay or device).requires_grad_(False).eval()


def _load_prequantized(
    part: PartSpec,
    config: Config,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_bytes: Callable[[int, int], None] | None,
) -> nn.Module:
    if config.mode == "dequant_once":
        return load.load_part(part, dtype=dtype, device=device, on_bytes=on_bytes)
    module = load.build_meta(part)
    stored = _Stored(part)
    layers = {name: one for name, one in config.chosen(module).items() if stored.is_quantized(name)}
    if not layers:
        raise Trouble(
            "bad_value",
            f"{part.files[0].name} holds no quantized layer of {part.name} that load_prequantized could read.",
            hint="Leave load_prequantized out; then full weights are quantized while they are loaded.",
        )
    for name, one in layers.items():
        layer = one.empty(module.get_submodule(name), dtype)
        tensors, about = stored.layer(name)
        replace_layer(module, name, _filled(layer, name, one, tensors, about, part, dtype).to(device))
    skipped = {f"{name}.{leaf}" for name in layers for leaf in ("weight", "bias")}
    load.fill(module, part, dtype=dtype, device=device, on_bytes=on_bytes, without=skipped)
    return module.eval().requires_grad_(False)


def _filled(
    layer: nn.Linear,
    name: str,
    config: QuantizeConfig,
    tensors: dict[str, torch.Tensor],
    about: dict[str, str],
    part: PartSpec,
    dtype: torch.dtype,
) -> nn.Linear:
    """`layer` with the tensors that its file has of it. Raises Trouble where they are not the method's."""
    try:
        state = config.backend.unflatten(tensors, about)
        state = {key.removeprefix(f"{name}."): value for key, value in state.items()}
        if layer.bias is not None:
            state["bias"] = state["bias"].to(dtype)
        if not config.backend.takes(state["weight"]):
            raise ValueError("its tensors are those of another method")
        layer.load_state_dict(state, assign=True)
    except (KeyError, ValueError, RuntimeError, StopIteration, AssertionError, TypeError) as error:
        at = part.tensors[f"{name}.weight"]
        raise Trouble(
            "bad_value",
            f"{at.file.name} stores {name} as {at.dtype}, which {config.method} cannot take: {str(error)[:200]}.",
            hint="Name the method with which the file was saved, or leave `quantize` out: such files are read without it too.",
        ) from None
    return layer


class _Stored:
    """What the files of a part hold beside each weight, under the part's own names."""

    def __init__(self, part: PartSpec):
        self.part, self.tensors, self.metadata = part, {}, {}
        for path in part.files:
            header = read_header(path)
            self.tensors |= header.tensors
            self.metadata |= header.metadata
        self.names: dict[str, list[str]] = {}
        for key in self.tensors:
            path = key.rpartition(".")[0]
            while path:
                self.names.setdefault(path, []).append(key)
                path = path.rpartition(".")[0]

    def is_quantized(self, name: str) -> bool:
        """Whether the weight of the layer `name` is stored as codes."""
        at = self.part.tensors.get(f"{name}.weight")
        return at is not None and (at.packed is not None or f"{name}.weight" in self.part.scales)

    def layer(self, name: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Its stored tensors by name, and what torchao's header says of them."""
        at: TensorAt = self.part.tensors[f"{name}.weight"]
        if at.swapped or (at.packed is not None and at.packed.rows is not None):
            raise Trouble(
                "not_supported",
                f"{at.file.name} keeps {name} in one tensor with others, so it cannot stay quantized.",
                hint="Leave load_prequantized out: it is dequantized then.",
            )
        there = at.pieces[0].key.rpartition(".")[0]
        found = {key: load.read_tensor(self.tensors[key]) for key in self.names[there]}
        found = {f"{name}{key.removeprefix(there)}": tensor for key, tensor in found.items()}
        said = self.metadata.get(f"{there}.weight")
        about = {"tensor_names": json.dumps([f"{name}.weight"]), f"{name}.weight": said} if said else {}
        return found, about
