"""Keys of LoRA files taken apart: what the end says the tensor is, what the beginning says it belongs to.

No weights, no torch.

A key is `<prefix><module><suffix>` and any prefix occurs with any suffix, so the two tables are independent of each
other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from backend.catalog.key_prefixes import unwrapped

LAST = {  # last name of a key -> what the tensor is
    "alpha": "alpha",
    "dora_scale": "magnitude",
    "magnitude": "magnitude_out",
    "lora_magnitude_vector": "magnitude_out",
    "lora_A": "down",
    "lora_B": "up",
    "lora_down": "down",
    "lora_up": "up",
    "diff": "diff",
    "diff_b": "diff_b",
    "w_norm": "diff",
    "b_norm": "diff_b",
    "diff_m": "diff_m",
    **{f"hada_{name}": f"hada_{name}" for name in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")},
    **{f"lokr_{name}": f"lokr_{name}" for name in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t1", "t2")},
    "set_weight": "set_weight",
    "reshape_weight": "reshape_weight",
    "scalar": "scalar",
    **{name: "vera" for name in ("vera_lambda_b", "vera_lambda_d")},
    **{name: "boft" for name in ("boft_R", "boft_s")},
    "ia3_l": "ia3_l",
    "oft_blocks": "oft",
    "oft_diag": "oft",
    "oft_R": "oft",
    "oft_r": "oft",
    "oft_embedding_R": "oft_embedding",
    "initial_norm": "oft_norm",
    "dora_multiplier": "oft_norm",
    "lora_embedding_A": "embedding_down",
    "lora_embedding_B": "embedding_up",
    "rescale": "oft_rescale",
    "on_input": "ia3_on_input",
}
LAST_TWO = {  # the two last names
    "lora_down.weight": "down",
    "lora_up.weight": "up",
    "lora_mid.weight": "mid",
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_A.bias": "down_bias",
    "lora_B.bias": "up_bias",
    "lora_down.bias": "down_bias",
    "lora_up.bias": "up_bias",
    "lora_magnitude_vector.weight": "magnitude_out",
    "lora.alpha": "alpha",
    "lora_linear_layer.alpha": "alpha",
    "lora_embedding_A.weight": "embedding_down",
    "lora_embedding_B.weight": "embedding_up",
    "oft_R.weight": "oft",
    "oft_embedding_R.weight": "oft_embedding",
    "oft_R.scaled_oft": "oft_marker",
    **{f"{name}.weight": f"glora_{name}" for name in ("a1", "a2", "b1", "b2", "bm")},
}
NAMED = {
    "lora_A": "down",
    "lora_B": "up",
    "lora_magnitude_vector": "magnitude_out",
    **{
        name: role
        for name, role in LAST.items()
        if name.startswith(("hada_", "lokr_", "oft_", "lora_embedding_", "vera_", "boft_", "ia3_"))
        and name not in ("oft_blocks", "oft_diag")
    },
}
PROCESSORS = {  # names under `.processor.` -> the module; FLUX.1 trainers number the picture's stream 1, the text's 2
    "qkv_lora1": "img_attn.qkv",
    "proj_lora1": "img_attn.proj",
    "qkv_lora2": "txt_attn.qkv",
    "proj_lora2": "txt_attn.proj",
    "qkv_lora": "qkv",
    "proj_lora": "linear2",
    "to_out_lora": "to_out.0",
}
ALGORITHMS = {  # what a module's tensors are called -> how people call the method
    "down": "LoRA",
    "up": "LoRA",
    "hada_w1_a": "LoHa",
    "lokr_w1": "LoKr",
    "lokr_w1_a": "LoKr",
    "diff": "full",
    "diff_b": "full",
    "diff_m": "full",
    "magnitude": "DoRA",
    "magnitude_out": "DoRA",
    "embedding_down": "LoRA",
    "embedding_up": "LoRA",
    "oft": "OFT",
    "oft_embedding": "OFT on an embedding",
    "oft_norm": "DoRA with OFT",
    "glora_a1": "GLoRA",
    "ia3_on_input": "(IA)3",
    "ia3_l": "(IA)3",
    "vera": "VeRA",
    "boft": "BOFT",
    "set_weight": "set_weight",
    "reshape_weight": "reshape_weight",
}
_DOTTED = re.compile(r"(.+?)\.(lora_[AB]|lora_magnitude_vector)\..+?(?:\.(weight|bias))?")
SCALES = (  # ends of a key that make it the scale of the 8-bit tensor that the rest of it names, longest first
    ".weight.scale_weight",
    ".weight.weight_scale",
    ".weight_scale",
    ".scale_weight",
    ".weight.scale",
    "_weight_scale",
    "_scale_weight",
    ".scales",
    ".scale",
    "_scales",
    "_scale",
)
INPUT_SCALES = (
    ".input_scale",
    ".scale_input",
)  # of a layer's input, for whoever multiplies in 8 bits; no part of a weight
# Names of what belongs to a quantized tensor:
QUANTIZED = re.compile(r"(?:^|_)(?:scales?|absmax|quant|quant_\w+|zero_?points?|zeros?|codebook)(?:_|$)")
OF_ALL = ("alpha", "scalar", "magnitude", "magnitude_out")  # roles that hold for every description of a module
BOUND = (
    "down",
    "up",
    "embedding_down",
    "embedding_up",
    "hada_",
    "lokr_",
)  # roles whose partners are spelt in the same way
BUNDLED = ("bundle_emb.", "emb_params", "string_to_param")

DIT, ANY = "dit", ""
PREFIXES = (  # regular expression, component ("" says nothing); longest first where one begins another
    (r"lora_unet__?", DIT),
    (r"lora_transformer_", DIT),
    (r"lora_prior_unet_", DIT),
    (r"lora_prior_te_", "text_encoder"),
    (r"lora_te1?_", "text_encoder"),
    (r"lora_te2_", "text_encoder_2"),
    (r"lora_te3_", "text_encoder_3"),
    (r"lycoris_", DIT),
    (r"oft_unet_", DIT),
    (r"(?!lora_)[A-Za-z0-9]\w*?_lora_", DIT),
    (r"text_encoders\.clip_g\.(?:transformer\.)?", "text_encoder_2"),
    (r"text_encoders\.\w*t5\w*\.(?:transformer\.)?", "text_encoder_3"),
    (r"text_encoders?\.(?:[A-Za-z0-9_]+\.transformer\.)?", "text_encoder"),
    (r"text_encoder_2\.", "text_encoder_2"),
    (r"text_encoder_3\.", "text_encoder_3"),
    (r"transformer(?:_2)?\.", DIT),
    (r"unet\.", DIT),
    (r"diffusion_model\.", DIT),
    (r"dit\.", DIT),
    (r"net\.", DIT),
    (r"base_model\.model\.", ANY),
    (r"base_model\.", ANY),
    (r"pipe\.", ANY),
    (r"model\.", ANY),
    (r"module\.", ANY),
    (r"_orig_mod\.", ANY),
)
_PREFIX = re.compile("|".join(f"({pattern})" for pattern, _ in PREFIXES))
_COMPONENTS = tuple(component for _, component in PREFIXES)


@dataclass(frozen=True)
class Reading:
    """One way to read a module's name: what is left after cutting prefixes, and whose module it then is."""

    name: str
    component: str  # "dit", "text_encoder", ...; "" where nothing says so
    prefix: str


@lru_cache(maxsize=65536)
def split_key(key: str) -> tuple[str, str] | None:
    """(module as the file spells it, wrappers of single blocks aside, role of the tensor), or None for a key that is no
    adapter's."""
    key = unwrapped(key)
    head, _, last = key.rpartition(".")
    if not head:
        return None
    outer, _, before = head.rpartition(".")
    role = LAST_TWO.get(f"{before}.{last}")
    if role:
        return (outer, role) if outer else None
    if last == "weight" and before in ("down", "up"):
        return _pair_of_processor(outer, before)
    if last in ("weight", "bias"):
        further, _, named = outer.rpartition(".")
        if named in NAMED and further:
            return further, NAMED[named] if last == "weight" else NAMED[named] + "_bias"
    if before in NAMED and outer and last not in ("weight", "bias") and not QUANTIZED.search(last):
        return outer, NAMED[before]
    role = LAST.get(last)
    if role == "alpha" and before.endswith("_lora") and outer.endswith(".processor"):
        return _pair_of_processor(head, role)
    if role or QUANTIZED.search(last):
        return (head, role) if role else None
    return _with_dotted_name(key)


def _with_dotted_name(key: str) -> tuple[str, str] | None:
    """Adapter names are free and may hold dots: `to_q.lora_A.style v1.5.weight`."""
    match = _DOTTED.fullmatch(key)
    return (match[1], NAMED[match[2]] + ("_bias" if match[3] == "bias" else "")) if match else None


def _pair_of_processor(outer: str, side: str) -> tuple[str, str] | None:
    """`….lora.down.weight`, `….lora_linear_layer.down.weight`, `….processor.<name>_lora[12].down.weight`."""
    head, _, name = outer.rpartition(".")
    if name in ("lora", "lora_linear_layer"):
        return (head, side) if head else None
    if "_lora" not in name or not head:
        return None
    module = PROCESSORS.get(name, name.partition("_lora")[0])
    if head.endswith(".processor"):
        head = head[: -len(".processor")]
    return f"{head}.{module}", side


def readings(stem: str) -> Iterator[Reading]:
    """The ways to read a module's name, nothing cut first, then one prefix more each time."""
    name, component, prefix = stem, "", ""
    yield Reading(name, component, prefix)
    while True:
        match = _PREFIX.match(name)
        if not match or match.end() == len(name):
            return
        said = _COMPONENTS[(match.lastindex or 1) - 1]
        component = said or component
        prefix, name = prefix + match.group(), name[match.end() :]
        yield Reading(name, component, prefix)


def innermost(stem: str) -> Reading:
    """The reading with all prefixes cut: right for telling the family, where no model is there to look names up in."""
    *_, last = readings(stem)
    return last


def scales_of(keys: Iterable[str]) -> dict[str, str]:
    """Scale's key -> key of the tensor that it belongs to ("" for one of a layer's input), in any spelling: what is
    left of the name of a scale is the name of another tensor, with or without `.weight`."""
    keys = keys if isinstance(keys, dict | set | frozenset) else set(keys)
    found = {}
    for key in keys:
        if not key.endswith(("scale", "scales", "scale_weight", "scale_input")) or key.endswith(".dora_scale"):
            continue
        if key.endswith(INPUT_SCALES):
            found[key] = ""
            continue
        for end in SCALES:
            rest = key.removesuffix(end)
            owner = next((name for name in (rest, f"{rest}.weight") if name in keys and name != key), None)
            if rest != key and owner is not None and (split_key(owner) or ("", "alpha"))[1] != "alpha":
                found[key] = owner
                break
    return found


def group(keys: Iterable[str]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """({module: {role: key}}, keys that are no adapter's); scales of 8-bit tensors (`scales_of`) are in neither.

    A module described twice over under one name becomes `module`, `module#2`, ...: pairs that are spelt alike stay
    together, and what there is of once (alpha) is everyone's.
    """
    keys = tuple(keys)
    scales = scales_of(frozenset(keys))
    copies: dict[str, dict[str, dict[str, str]]] = {}  # module -> spelling of its factors -> {role: key}
    shared: dict[str, list[tuple[str, str]]] = {}
    others = []
    for key in keys:
        if key in scales:
            continue
        parted = split_key(key)
        if parted is None:
            others.append(key)
            continue
        stem, role = parted
        here = copies.setdefault(stem, {})
        if not role.startswith(BOUND) or role.endswith("_bias"):
            shared.setdefault(stem, []).append((role, key))
            continue
        style, again = _style(key), 2
        while role in here.setdefault(style, {}):
            style, again = f"{_style(key)}#{again}", again + 1
        here[style][role] = key
    return {
        name: roles
        for stem, styles in copies.items()
        for name, roles in _copies(stem, list(styles.values()), shared.get(stem, ()))
    }, others


def _copies(
    stem: str, pairs: list[dict[str, str]], shared: Iterable[tuple[str, str]]
) -> Iterator[tuple[str, dict[str, str]]]:
    """The descriptions of one module: halves under two spellings are one, and so are different algorithms."""
    whole: list[dict[str, str]] = []
    for roles in pairs:
        into = next((one for one in whole if not one.keys() & roles.keys()), None)
        if into is None:
            whole.append(dict(roles))
        else:
            into.update(roles)
    whole = whole or [{}]
    for role, key in shared:
        into = next((one for one in whole if role not in one), None)
        if into is None:
            whole.append(into := {})
        into[role] = key
    for number, roles in enumerate(whole):
        if number and roles.keys() & whole[0].keys():
            roles.update({role: key for role, key in whole[0].items() if role in OF_ALL and role not in roles})
        yield (stem if number == 0 else f"{stem}#{number + 1}"), roles


def _style(key: str) -> str:
    """How the factors in `key` are called, without what tells one from its partner."""
    spelt = re.sub(r"(?<=lora_)[AB](?![a-z])", "~", key)
    spelt = re.sub(r"(?<=embedding_)[AB](?![a-z])", "~", spelt)
    spelt = re.sub(r"(?<![a-z])(?:down|up)(?![a-z])", "~~", spelt)
    spelt = re.sub(r"(hada|lokr)_[wt]\d(?:_[ab])?", r"\1", spelt)
    return spelt.removesuffix(".weight")


def plain(stem: str) -> str:
    """The module's name without the mark of a repetition."""
    return stem.partition("#")[0]


def is_adapter(keys: Iterable[str]) -> bool:
    """Whether these are a LoRA's keys: adapter tensors, and hardly anything beside them.

    Biases without their weights are no sign of a model: PEFT saves all of them for `bias="all"`.
    """
    keys = tuple(keys)
    there = frozenset(keys)
    scales = scales_of(there)
    num_adapter = num_other = 0
    for key in keys:
        if key in scales:
            continue
        parted = split_key(key)
        if parted is None:
            alone = key.endswith(".bias") and f"{key.removesuffix('bias')}weight" not in there
            num_other += not alone and not key.startswith(BUNDLED)
        elif parted[1] != "alpha":
            num_adapter += 1
    return num_adapter > 0 and num_other <= num_adapter
