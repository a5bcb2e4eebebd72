"""NF4, FP4 and LLM.int8() by the package bitsandbytes. Source of the stored form: QuantState.as_dict of bitsandbytes 0.50."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch.nn import Linear, Module, Parameter

from backend.engine.quantization.backend_type import Backend, State

FOUR_BITS = {"compress_statistics": True, "blocksize": None, "quant_storage": torch.uint8}
EIGHT_BITS = {"threshold": 6.0}


def _is_made_here(module: Module, *names: str) -> bool:
    """Whether `module` is of one of bitsandbytes' classes, without importing the package."""
    return any(kind.__module__.startswith("bitsandbytes") and kind.__name__ in names for kind in type(module).__mro__)


@lru_cache(maxsize=2)
def _loadable(name: str) -> type[Linear]:
    """bitsandbytes' layer that takes its stored tensors with `load_state_dict(assign=True)`, whose shapes are not the weight's."""
    from bitsandbytes import nn

    kind = getattr(nn, name)

    def load(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        for leaf in ("weight", "bias"):
            if getattr(self, leaf) is None:
                continue
            if f"{prefix}{leaf}" not in state_dict:
                missing_keys.append(f"{prefix}{leaf}")
                continue
            value = state_dict[f"{prefix}{leaf}"]
            setattr(self, leaf, value if isinstance(value, Parameter) else Parameter(value, requires_grad=False))

    return type(name, (kind,), {"_load_from_state_dict": load, "__module__": kind.__module__})


def _four(layer: Linear, dtype: torch.dtype, kind: str, settings: Mapping) -> Linear:
    made = _loadable("Linear4bit")(
        layer.in_features,
        layer.out_features,
        bias=False,
        device="meta",
        compute_dtype=dtype,
        compress_statistics=settings["compress_statistics"],
        quant_type=kind,
        quant_storage=settings["quant_storage"],
    )
    made.bias = layer.bias
    # On some processors it would lay its codes out anew at the first call, in place, and only where 32 divides the rows.
    made.support_avx512bf16_for_cpu = False
    return made


def _quantize_four(kind: str):
    def quantize(layer: Linear, settings: Mapping) -> Linear:
        from bitsandbytes.nn import Params4bit

        weight = layer.weight.detach()
        made = _four(layer, weight.dtype, kind, settings)
        made.weight = Params4bit(
            weight.cpu(),
            requires_grad=False,
            compress_statistics=settings["compress_statistics"],
            blocksize=settings["blocksize"],
            quant_type=kind,
            quant_storage=settings["quant_storage"],
        )
        return made.to(weight.device)

    return quantize


def _full_four(layer: Linear) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(layer.weight.data, layer.weight.quant_state)


def _unflatten_four(flat: State, metadata: Mapping[str, str]) -> State:
    from bitsandbytes.nn import Params4bit

    owned = {key.partition(".weight.")[0] for key in flat if ".weight.quant_state.bitsandbytes__" in key}
    state = {
        key: value for key, value in flat.items() if key.partition(".weight.")[0] not in owned or ".weight." not in key
    }
    for module in owned:
        stats = {key: value for key, value in flat.items() if key.startswith(f"{module}.weight.")}
        weight = flat[f"{module}.weight"]
        state[f"{module}.weight"] = Params4bit.from_prequantized(
            data=weight, quantized_stats=stats, requires_grad=False, device=weight.device
        )
    return state


def _eight(layer: Linear, settings: Mapping) -> Linear:
    made = _loadable("Linear8bitLt")(
        layer.in_features,
        layer.out_features,
        bias=False,
        device="meta",
        has_fp16_weights=False,
        threshold=settings["threshold"],
    )
    made.bias = layer.bias
    return made


def _quantize_eight(layer: Linear, settings: Mapping) -> Linear:
    from bitsandbytes.nn import Int8Params

    made = _eight(layer, settings)
    made.weight = Int8Params(layer.weight.detach().cpu(), requires_grad=False, has_fp16_weights=False)
    return made.to(layer.weight.device)


def _full_eight(layer: Linear) -> torch.Tensor:
    codes = layer.weight.data if layer.weight.CB is None else layer.weight.CB
    factors = layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB
    return (codes.float() * factors.float().view(-1, 1) / 127).to(_dtype_eight(layer))


def _dtype_eight(layer: Linear) -> torch.dtype:
    return torch.bfloat16 if layer.bias is None else layer.bias.dtype  # the codes do not tell


def _unflatten_eight(flat: State, metadata: Mapping[str, str]) -> State:
    from bitsandbytes.nn import Int8Params

    state = dict(flat)
    for key in [key for key in flat if key.endswith(".SCB")]:
        module = key.removesuffix(".SCB")
        state.pop(key), state.pop(f"{module}.weight_format", None)
        codes = flat[f"{module}.weight"]
        state[f"{module}.weight"] = Int8Params(
            codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=flat[key]
        )
    return state


def _four_bits(kind: str) -> Backend:
    return Backend(
        settings=FOUR_BITS,
        quantize=_quantize_four(kind),
        empty=lambda layer, dtype, settings: _four(layer, dtype, kind, settings),
        owns=lambda module: _is_made_here(module, "Linear4bit"),
        computing_dtype=lambda layer: layer.weight.quant_state.dtype,
        full_weight=_full_four,
        flatten=lambda state: (dict(state), {}),  # the layers' own state is plain tensors
        unflatten=_unflatten_four,
        takes=lambda weight: getattr(getattr(weight, "quant_state", None), "quant_type", "") == kind,
    )


NF4, FP4 = _four_bits("nf4"), _four_bits("fp4")
LLM_INT8 = Backend(
    settings=EIGHT_BITS,
    quantize=_quantize_eight,
    empty=lambda layer, dtype, settings: _eight(layer, settings),
    owns=lambda module: _is_made_here(module, "Linear8bitLt"),
    computing_dtype=_dtype_eight,
    full_weight=_full_eight,
    flatten=lambda state: (dict(state), {}),
    unflatten=_unflatten_eight,
    takes=lambda weight: type(weight).__name__ == "Int8Params",
)
