"""Forms of single vendors: NVFP4 of NVIDIA's ModelOpt; and those that are known by their tensors and refused by
name."""

from __future__ import annotations

from backend.catalog.quantization.comfyui import input_factor, kept_rows, tiled
from backend.catalog.quantization.layer import Decision, Layer, check_roles, check_tensor, not_read, packed, refusal

NAMED = (  # roles that only one form has -> its name
    (("wscales", "smooth_factor", "smooth_factor_orig", "smooth"), "SVDQuant INT4 (Nunchaku)"),
    (("qzeros", "g_idx"), "GPTQ or AWQ"),
    (("W_q",), "HQQ"),
    (("weight_packed",), "compressed-tensors"),
    (("weight_scale_2", "pre_quant_scale"), "NVFP4"),
    (("svd_up", "svd_down"), "SDNQ"),
)


def modelopt(layer: Layer) -> Decision | None:
    """NVFP4 as ModelOpt exports it: the low nibble is the even column, and scales lie in rows unless they were tiled
    for ComfyUI.

    Source: modelopt/torch/export/diffusers_utils.py and quantization/qtensor/nvfp4_tensor.py of NVIDIA/Model-Optimizer.
    """
    if not layer.has("weight_scale_2"):
        return None
    title = "NVFP4 (ModelOpt)"
    if layer.about.method != "modelopt" or layer.entry.get("format", "nvfp4") != "nvfp4":
        raise refusal(layer, "NVFP4, and nothing says in which order its codes and scales lie")
    check_roles(layer, title, ("weight", "weight_scale"))
    if layer.stored.dtype != "U8" or len(layer.stored.shape) != 2 or layer.stored.shape[1] % 8:
        raise refusal(layer, f"{title}, but its weight is {layer.stored.dtype} {list(layer.stored.shape)}")
    rows, half = layer.stored.shape
    plain, tiles = (rows, half // 8), tiled(rows, half // 8)
    check_tensor(layer, title, "weight_scale", ("F8_E4M3", "U8"), plain, tiles)
    check_tensor(layer, title, "weight_scale_2", ("F32",), (), (1,), (1, 1))
    if plain == tiles and layer.about.layerwise:
        raise refusal(layer, f"{title}, and nothing says whether its scales lie in rows or in tiles")
    roles = {"weight": "weight", "scale": "weight_scale", "whole": "weight_scale_2"} | input_factor(
        layer, title, 2 * half
    )
    settings = {"tiled": tuple(layer.tensors["weight_scale"].shape) != plain, "high_first": False}
    return packed(layer, "nvfp4", title, roles, (kept_rows(layer, rows, 16), 2 * half), settings)


def named(layer: Layer) -> Decision | None:
    """Refuses what is known by tensors that only one form has."""
    for roles, title in NAMED:
        if layer.has(*roles):
            raise not_read(layer, title)
    if layer.has("qweight"):
        raise not_read(layer, "SVDQuant, GPTQ or AWQ")
    return None
