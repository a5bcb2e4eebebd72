"""SVDQuant as Nunchaku's single files of Qwen-Image hold it: 4-bit codes and a low-rank part, in the order of the
tensor cores' lanes.

W = (codes x wscales) / smooth_factor + proj_up @ proj_down; with 4-bit floats the codes are e2m1 and wcscales (by
output) and wtscale multiply too. `to_qkv` and `add_qkv_proj` are q, k and v one below the other; rows are packed in
tiles of 128, so each lies by itself. Modulation layers are AWQ: W = code x wscales + wzeros, with their six outputs
interleaved and 1 added to the bias of both scales. The kernel adds 0.171875 to the input of the MLPs' second layers on
the int4 path, and their stored bias makes up for it.

Sources: nunchaku/models/linear.py, models/attention.py and models/transformers/transformer_qwenimage.py of
nunchaku-tech/nunchaku; deepcompressor/backend/nunchaku and backend/tinychat of mit-han-lab/deepcompressor.
"""

from __future__ import annotations

import math
from dataclasses import replace

from backend.catalog.quantization.layer import Decision, Layer, check_roles, check_tensor, not_read, refusal
from backend.catalog.spec import Packed, TensorAt

FUSED = {"to_qkv": ("to_q", "to_k", "to_v"), "add_qkv_proj": ("add_q_proj", "add_k_proj", "add_v_proj")}
WHOLE = (
    "attn.to_out.0",
    "attn.to_add_out",
    "img_mlp.net.0.proj",
    "txt_mlp.net.0.proj",
    "img_mlp.net.2",
    "txt_mlp.net.2",
)
SHIFTED = ("img_mlp.net.2", "txt_mlp.net.2")
MODULATION = ("img_mod.1", "txt_mod.1")
OLDER = ("smooth", "smooth_orig", "lora_down", "lora_up")
SIXTEEN = ("BF16", "F16")
TILE = 128  # rows that are packed together
GROUPS = {"int4": 64, "nvfp4": 16}


def match(layer: Layer) -> Decision | None:
    if not layer.has("wscales", "wzeros", "smooth_factor", "proj_down", "wcscales", "wtscale"):
        return None
    title = f"SVDQuant {'NVFP4' if _kind(layer) == 'nvfp4' else 'INT4'} (Nunchaku)"
    ends = tuple(f"attn.{name}" for name in FUSED)
    if layer.about.method != "svdquant" or layer.has(*OLDER) or not layer.module.endswith((*WHOLE, *MODULATION, *ends)):
        raise not_read(layer, title)
    check_roles(layer, title, ("qweight", "wscales", "bias"))
    return _modulation(layer, title) if layer.module.endswith(MODULATION) else _linear(layer, title)


def _kind(layer: Layer) -> str:
    scales = layer.tensors.get("wscales")
    return "nvfp4" if layer.has("wcscales", "wtscale") or (scales is not None and scales.dtype == "F8_E4M3") else "int4"


def _linear(layer: Layer, title: str) -> Decision:
    kind = _kind(layer)
    check_roles(layer, title, ("smooth_factor", "proj_down", "proj_up"))
    check_tensor(layer, title, "qweight", ("I8",))
    codes, down = layer.tensors["qweight"], layer.tensors["proj_down"]
    if (
        len(codes.shape) != 2
        or len(down.shape) != 2
        or codes.shape[0] % TILE
        or codes.shape[1] % 64
        or down.shape[1] % 16
    ):
        raise refusal(
            layer, f"{title} of codes {list(codes.shape)} and rank {list(down.shape)[-1:]}, which are no whole tiles"
        )
    rows, columns, rank = codes.shape[0], 2 * codes.shape[1], down.shape[1]
    said = layer.about.config.get("weight")
    said = str(said.get("dtype", "")) if isinstance(said, dict) else ""
    if ("fp4" in said) != (kind == "nvfp4") and said:
        raise refusal(layer, f"{title}, while the header's quantization_config says {said[:40]}")
    check_tensor(layer, title, "wscales", SIXTEEN if kind == "int4" else ("F8_E4M3",), (columns // GROUPS[kind], rows))
    check_tensor(layer, title, "smooth_factor", SIXTEEN, (columns,))
    check_tensor(layer, title, "proj_down", SIXTEEN, (columns, rank))
    check_tensor(layer, title, "proj_up", SIXTEEN, (rows, rank))
    check_tensor(layer, title, "bias", SIXTEEN, (rows,))
    by_row = {"weight": "qweight", "scale": "wscales", "up": "proj_up"}
    shared = {"smooth": "smooth_factor", "down": "proj_down"}
    if layer.has("wcscales"):
        check_tensor(layer, title, "wcscales", SIXTEEN, (rows,))
        by_row["channel"] = "wcscales"
    if layer.has("wtscale"):
        check_tensor(layer, title, "wtscale", ("F32", *SIXTEEN), (), (1,))
        shared["whole"] = "wtscale"
    owner, _, leaf = layer.module.rpartition(".")
    names = [f"{owner}.{name}" for name in FUSED[leaf]] if leaf in FUSED else [layer.module]
    if rows % (TILE * len(names)):
        raise refusal(layer, f"{title} of {rows} rows for {len(names)} layers, which are no whole tiles")
    shifted = kind == "int4" and layer.module.endswith(SHIFTED)
    made: dict[str, TensorAt] = {}
    for number, name in enumerate(names):
        pieces = [(role, _cut(layer.tensors[at], number, len(names))) for role, at in by_row.items()]
        pieces += [(role, layer.tensors[at]) for role, at in shared.items()]
        bias = [("bias", _cut(layer.tensors["bias"], number, len(names)))]
        if shifted:
            bias += [piece for piece in pieces if piece[0] in ("weight", "scale", "smooth")]
        shape = (rows // len(names), columns)
        made[f"{name}.weight"] = _made("svdquant", title, pieces, shape, kind)
        made[f"{name}.bias"] = _made("svdquant_bias", title, bias, shape[:1], kind)
    used = frozenset(("bias", "smooth_factor_orig", *by_row.values(), *shared.values()))
    return Decision(made.pop(layer.name, None), used=used, others=made)


def _modulation(layer: Layer, title: str) -> Decision:
    check_roles(layer, title, ("wzeros",))
    check_tensor(layer, title, "qweight", ("I32",))
    words, bias = layer.tensors["qweight"], layer.tensors["bias"]
    check_tensor(layer, title, "bias", SIXTEEN)
    fine = (
        len(words.shape) == 2
        and words.shape[1] % 32 == 0
        and bias.shape == (4 * words.shape[0],)
        and bias.shape[0] % 6 == 0
    )
    if not fine:
        raise refusal(layer, f"{title} of codes {list(words.shape)} with a bias {list(bias.shape)}")
    rows, columns = 4 * words.shape[0], 2 * words.shape[1]
    groups = columns // 64
    for role in ("wscales", "wzeros"):
        at = layer.tensors[role]
        if at.dtype not in SIXTEEN or len(at.shape) != 2 or at.shape[1] != rows or at.shape[0] < groups:
            raise refusal(layer, f"{title}, but its {role} is {at.dtype} {list(at.shape)}, which does not fit")
    pieces = [("weight", words), ("scale", layer.tensors["wscales"]), ("zeros", layer.tensors["wzeros"])]
    used = frozenset(("qweight", "wscales", "wzeros", "bias"))
    weight = _made("svdquant_modulation", title, pieces, (rows, columns), "int4")
    others = {f"{layer.module}.bias": _made("svdquant_modulation_bias", title, [("bias", bias)], (rows,), "int4")}
    return Decision(weight, used=used, others=others)


def _made(form: str, title: str, pieces: list[tuple[str, TensorAt]], shape: tuple[int, ...], kind: str) -> TensorAt:
    first = pieces[0][1]
    made = Packed(form, tuple(pieces), (("kind", kind),), shape)
    return TensorAt(first.file, first.key, title, shape, first.start, first.end, packed=made)


def _cut(at: TensorAt, number: int, count: int) -> TensorAt:
    """One of `count` equal runs of bytes, flat: packed rows lie tile by tile, whatever the shape says."""
    if count == 1:
        return at
    step = at.nbytes // count
    start = at.start + number * step
    return replace(at, shape=(math.prod(at.shape) // count,), start=start, end=start + step)
