"""How a part of a pipeline is loaded where more is said than where its weights lie: quantized, from a state dict, or
without weights.

Weights of such a part are not those of its file, so nothing may read them from there again: where memory runs out they
are neither moved nor stored otherwise, and LoRAs act beside quantized layers. A part that is quantized *and* moved is
written quantized to a file of its own first, in the cache, and is then an ordinary one that is placed; the file goes
when the pipeline is closed.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from backend.catalog.quantization.methods import METHODS
from backend.catalog.spec import PartSpec
from backend.engine.loading import check_finite, load
from backend.engine.quantization.config import MixedQuantizeConfig, QuantizeConfig
from backend.engine.quantization.quantized_file import read_quantized, write_quantized
from backend.engine.quantization.quantized_part import load_quantized
from backend.schema.messages import Trouble
from backend.schema.paths import places

Tell = Callable[[int, int], None] | None


@dataclass(frozen=True)
class Loading:
    """`quantize`: which layers, and how. `state_dict`: the weights, under the names that the part's file has or the
    module's own. `clear_parameters`: none at all, for who needs only the module's structure."""

    quantize: QuantizeConfig | MixedQuantizeConfig | None = None
    state_dict: Mapping[str, torch.Tensor] | None = None
    clear_parameters: bool = False

    @property
    def is_plain(self) -> bool:
        return self == Loading()

    @property
    def is_once(self) -> bool:
        """Whether a file with quantized weights is simply to be read in full, as it is without being asked."""
        config = self.quantize
        return config is not None and config.mode == "dequant_once" and config.load_prequantized


def is_fixed(pipeline, name: str) -> bool:
    """Whether the weights of the part cannot be read again from its file, so that they stay as and where they are."""
    said = pipeline.loading.get(name)
    return said is not None and not said.is_plain and not said.is_once and name not in pipeline.packed


def check_usable(pipeline, name: str) -> None:
    """Raises Trouble for a part that was loaded without its parameters."""
    if name in pipeline.loading and pipeline.loading[name].clear_parameters:
        raise Trouble(
            "missing_part",
            f"The part {name} was loaded without its weights (clear_parameters), so it cannot compute.",
            hint="Load it without clear_parameters.",
        )


def check(name: str, said: Loading, *, moved: bool, fp8_products: bool) -> None:
    """Raises Trouble for what does not go together; nothing has to be loaded for it."""
    if said.is_plain:
        return
    if said.quantize is not None and said.clear_parameters:
        raise Trouble(
            "bad_value", f"The part {name} is to be quantized and to have no parameters.", hint="Leave one of them out."
        )
    if said.state_dict is not None and moved:
        raise Trouble(
            "not_supported",
            f"The part {name} is given as a state_dict, and weights that are moved are read from their file.",
            hint="Save it as safetensors and give its path, or leave out the eight fields of placement.",
        )
    if said.quantize is None:
        return
    if fp8_products:
        raise Trouble(
            "bad_value", f"The part {name} is to be quantized and to multiply in FP8.", hint="Leave fp8_products out."
        )
    active = [method for method in said.quantize.methods if METHODS[method].activations]
    if moved and active and not said.is_once:
        raise Trouble(
            "not_supported",
            f"{active[0]} multiplies in few bits on the device where the part {name} stays; its weights cannot be moved.",
            hint="Take a method that quantizes weights alone, or leave out the eight fields of placement.",
        )
    if moved and said.quantize.mode == "dequant_once" and not said.quantize.load_prequantized:
        raise Trouble(
            "not_supported",
            f"The part {name} is dequantized again at once (mode 'dequant_once'), and what is moved is read from its file.",
            hint="Leave out the mode, or the eight fields of placement.",
        )


def load_part(pipeline, name: str, tell: Tell) -> torch.nn.Module:
    """The module of a part that stays where it is, as `pipeline.loading` says."""
    part, said = pipeline.spec.parts[name], pipeline.loading.get(name, Loading())
    keywords = {"dtype": pipeline.dtype, "device": pipeline.device, "on_bytes": tell}
    if said.clear_parameters:
        return cleared(load.build_meta(part), pipeline.device)
    if said.state_dict is not None:
        module = load.build_meta(part)
        _take_state(module, part, said.state_dict, pipeline.dtype)
        if said.quantize is not None:
            module = _quantized(module, said.quantize, pipeline)
        return module.to(pipeline.device).eval().requires_grad_(False)
    if said.quantize is None or said.is_once:
        module = load.load_part(part, **keywords)
        check_finite.check(part, module)
        return module
    check_finite.check(part)
    module = load_quantized(part, said.quantize, **keywords)
    if said.quantize.mode == "dynamic":
        module.load_state_dict = _refuse_state
    return module


def _refuse_state(*_, **__):
    """Raises Trouble: full weights do not go into quantized layers."""
    raise Trouble(
        "not_supported",
        "load_state_dict cannot change this part, whose layers are quantized.",
        hint="Give the weights when the part is loaded: ModelConfig(path=..., state_dict=..., quantize=...).",
    )


def _quantized(module: torch.nn.Module, config, pipeline) -> torch.nn.Module:
    config.quantize_model(module, compute_device=pipeline.device)
    return config.dequantize_model(module, compute_dtype=pipeline.dtype)


def cleared(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """`module` without a single parameter, as DiffSynth-Studio leaves it."""
    for inner in module.modules():
        for leaf in list(inner._parameters):
            inner._parameters[leaf] = None
    load.move_computed_buffers(module, device)
    return module.eval()


def _take_state(module: torch.nn.Module, part: PartSpec, state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Gives `module` the tensors of `state`, in `dtype`. Raises Trouble where one is missing or has another shape."""
    named = {
        *dict(module.named_parameters(remove_duplicate=False)),
        *dict(module.named_buffers(remove_duplicate=False)),
    }
    for name, at in part.tensors.items():
        if name not in named:
            continue
        tensor = state.get(name, state.get(at.key))
        if not isinstance(tensor, torch.Tensor):
            raise Trouble(
                "bad_value",
                f"The state_dict of {part.name} has no tensor {name}.",
                hint="It needs every tensor that the file has.",
            )
        if tuple(tensor.shape) != tuple(at.shape):
            raise Trouble(
                "shape_mismatch",
                f"{name} of the state_dict is {list(tensor.shape)}, but {part.name} has {list(at.shape)}.",
            )
        load.assign(module, name, tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach())


def place_packed(pipeline, name: str, tell: Tell) -> None:
    """Makes the file of a part that is quantized and moved, unless its own is quantized already; `pipeline.packed` says
    which weights stay so."""
    part, config = pipeline.spec.parts[name], pipeline.loading[name].quantize
    if not config.load_prequantized:
        folder = places().cache / "quantized"
        folder.mkdir(parents=True, exist_ok=True)
        own = Path(tempfile.mkdtemp(dir=folder, prefix=f"{name}-"))
        weakref.finalize(pipeline, shutil.rmtree, own, ignore_errors=True)
        file = own / f"{name}.safetensors"
        write_quantized({name: (part, config)}, file, dtype=pipeline.dtype, device=pipeline.device, on_bytes=tell)
        part = read_quantized(part, file)
        pipeline.spec = replace(pipeline.spec, parts={**pipeline.spec.parts, name: part})
        pipeline.adapters.specs[name] = part
        pipeline.note(f"The quantized {name} waits in a file of {file.stat().st_size / 2**30:.2f} GiB in {folder}.")
    pipeline.packed[name] = stays_packed(config)


def stays_packed(config) -> Callable[[str], bool]:
    """Whether the weight called so stays as the file has it."""
    return lambda name: name.endswith(".weight") and config.config_of(name.removesuffix(".weight")) is not None
