"""What is traced: networks built on fake tensors, and the calls that Loft makes of them: the families' own.

A *point* is what a stage's bytes depend on: `h`, `w` latent rows and columns, `f` latent frames, `t` text tokens, `b`
pictures that go through together, `r` LoRA rank. Where a family computes with functions of its own, those functions are
called.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from backend import families
from backend.catalog.family import Family
from backend.engine.loading.load import checked_network
from backend.engine.tracing.allocation_recorder import Tape, record
from backend.planner.costs.model_sizes import published
from backend.planner.costs.training_method import Method
from backend.system.text_files import ends_with

LORA = Method()


def build(network: str, config: dict, dtype: torch.dtype) -> torch.nn.Module:
    """The network "package:Class" with parameters of `dtype`; call it under fake tensors. Sizes that a class keeps in
    float32 stay so."""
    name, kind = network.rpartition(":")[2], _class_of(network)
    with _default(dtype):
        if hasattr(kind, "config_class"):
            config = {**config, "attn_implementation": "sdpa"}
            module = kind(kind.config_class(**config))
        else:
            module = kind(**config)
    _keep_float32(module)
    known = families.of_network(name)
    if known is not None:
        known[0].prepare(known[1], module)
    return module.eval().requires_grad_(False)


def _class_of(network: str) -> type:
    """The class: a network that the estimate knows by name may be spelt by its library alone
    ("diffusers:AutoencoderKL")."""
    package, _, name = network.partition(":")
    if package in ("diffusers", "transformers") and name in published()["networks"]:
        return getattr(importlib.import_module(package), name)
    return checked_network(network)


@contextlib.contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    kept = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(kept)


def _keep_float32(module: torch.nn.Module) -> None:
    """Parameters that the libraries load in float32 whatever is asked for (transformers' plain list is for float16
    alone)."""
    listed = "_keep_in_fp32_modules" if hasattr(module, "register_to_config") else "_keep_in_fp32_modules_strict"
    precise = getattr(module, listed, None) or ()
    for name, owner in module.named_modules():
        for key, weight in list(owner._parameters.items()):
            if weight is not None and any(word in f"{name}.{key}".split(".") for word in precise):
                full = torch.empty(weight.shape, dtype=torch.float32)
                owner._parameters[key] = torch.nn.Parameter(full, requires_grad=False)


def resident(module: torch.nn.Module) -> list[torch.Tensor]:
    """Tensors that are there before and after: parameters, buffers, gradients, tables."""
    weights = list(module.parameters())
    return [
        *weights,
        *module.buffers(),
        *tables(module),
        *(weight.grad for weight in weights if weight.grad is not None),
    ]


def tables(module: torch.nn.Module) -> list[torch.Tensor]:
    """Tensors that classes keep beside their parameters and buffers, such as rotary angles: attributes, and lists of
    them."""
    kept = [
        value for layer in module.modules() for value in vars(layer).values() if isinstance(value, torch.Tensor | list)
    ]
    return [
        one
        for value in kept
        for one in ([value] if isinstance(value, torch.Tensor) else value)
        if isinstance(one, torch.Tensor)
    ]


def trace(module: torch.nn.Module, work: Callable[[Tape], object], *, warm: bool = True, grad: bool = False) -> Tape:
    """The tape of `work`. A first run fills tables that modules keep, unless `warm` is False."""
    with contextlib.nullcontext() if grad else torch.no_grad():
        if warm:
            record(work, weights=resident(module))
        return record(work, weights=resident(module))


def predict(module: torch.nn.Module, point: dict, dtype: torch.dtype) -> torch.Tensor:
    """One pass through a diffusion transformer at `point`, by the call that draws with it. Of several streams, the
    first's prediction."""
    family, part = owner(module)
    x, sigma, cond = family.example_inputs(module, whole(point), dtype)
    found = family.predict({part: module}, x, sigma, cond, part=part)
    return next(iter(found.values())) if isinstance(found, dict) else found


def owner(module) -> tuple[Family, str]:
    """The family and the part of a network, which may be wrapped by peft. Raises ValueError where no family has it."""
    kind = type(module).__name__
    found = families.of_network(kind)
    if found is None:
        raise ValueError(f"No family calls {kind}.")
    return found


def whole(point: dict) -> dict:
    """A point with everything that a family's example inputs may depend on."""
    return {"b": 1, "t": 64, "f": 1, **point}


def encode_text(module: torch.nn.Module, point: dict, dtype: torch.dtype) -> torch.Tensor:
    """Text tokens (b, t) through a text encoder as the families call it (no key-value cache, last states)."""
    ids = torch.zeros(point.get("b", 1), point["t"], dtype=torch.long)
    kind = type(module).__name__
    known = families.of_network(kind)
    found = known[0].trace_encoder(known[1], module, {"b": 1, **point}, dtype) if known is not None else None
    if found is not None:
        return found
    if kind.startswith(("T5", "UMT5")):
        return module(input_ids=ids, attention_mask=None).last_hidden_state
    if kind == "CLIPTextModel":
        return module(input_ids=torch.zeros(point.get("b", 1), 77, dtype=torch.long)).last_hidden_state
    if kind == "CLIPVisionModel":
        size = module.config.image_size
        return module(
            torch.empty(point.get("b", 1), 3, size, size, dtype=dtype), output_hidden_states=True
        ).hidden_states[-2]
    module = getattr(module, "language_model", module)
    with _one_prompt_a_row():
        return module(input_ids=ids, attention_mask=None, use_cache=False).last_hidden_state


@contextlib.contextmanager
def _one_prompt_a_row() -> Iterator[None]:
    """transformers looks at the numbers of positions to see whether rows are packed; fake tensors have none, and none
    are packed."""
    from transformers import masking_utils

    kept = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = kept


def decode(module: torch.nn.Module, point: dict, dtype: torch.dtype, *, tiled: bool = False) -> torch.Tensor:
    """Latents (b, C, f, h, w) to pixels."""
    said, batch = module.config, point.get("b", 1)
    known = families.of_network(type(module).__name__)
    channels = getattr(said, "z_dim", None) or said.latent_channels
    if known is not None and known[0].DRAWS:
        frames = (point.get("f", 1),) if known[0].SIZES.frame_compression > 1 else ()
        latents = torch.empty(batch, channels, *frames, point["h"], point["w"], dtype=dtype)
        return known[0].decode({known[1]: module}, latents, tiled=tiled)
    if type(module).__name__ == "AutoencoderKL":
        module.use_tiling, module.tile_sample_min_size, module.tile_latent_min_size = tiled, 512, 64
        shape = (batch, channels, point["h"], point["w"])
        return module.decode(torch.empty(shape, dtype=dtype), return_dict=False)[0]
    module.use_tiling = tiled
    z = torch.empty(batch, channels, point.get("f", 1), point["h"], point["w"], dtype=dtype)
    return module.decode(z, return_dict=False)[0]


def encode_image(module: torch.nn.Module, point: dict, dtype: torch.dtype) -> torch.Tensor:
    """Pixels of the size that `point` decodes to, to latents."""
    kind, batch, side = type(module).__name__, point.get("b", 1), pixels_per_cell(module)
    shape = (point["h"] * side, point["w"] * side)
    known = families.of_network(kind)
    frames = 4 * (point.get("f", 1) - 1) + 1
    if known is not None and known[0].DRAWS:
        channels = getattr(module.config, "input_channels", None) or module.config.in_channels
        several = (frames,) if known[0].SIZES.frame_compression > 1 else ()
        return known[0].encode_image({known[1]: module}, torch.empty(batch, channels, *several, *shape, dtype=dtype))
    if kind == "AutoencoderKL":
        return module.encode(torch.empty(batch, 3, *shape, dtype=dtype), return_dict=False)[0].mean
    return module.encode(torch.empty(batch, 3, frames, *shape, dtype=dtype), return_dict=False)[0].mean


def pixels_per_cell(module) -> int:
    return getattr(module.config, "scale_factor_spatial", None) or 8


class _Never:
    """In the place of the chance with which peft leaves an adapter out: it compares that with a number drawn, and fake
    tensors have none."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        return True


def add_lora(
    module: torch.nn.Module,
    targets: list[str],
    rank: int,
    dtype: torch.dtype,
    *,
    thin: bool = True,
    method: Method = LORA,
) -> None:
    """Adapters of `rank` on the linear layers whose names end in `targets`, with weights of `dtype`; `thin` as the
    trainer makes them."""
    import peft

    from backend.engine.lora import low_memory_linear
    from backend.engine.lora.trained_adapters import peft_config

    # peft moves what it wraps to its device, which fake parameters do not allow and do not need
    kept, torch.nn.Module.to = torch.nn.Module.to, lambda self, *args, **kwargs: self
    try:
        with _default(dtype):
            linear = [name for name, part in module.named_modules() if isinstance(part, torch.nn.Linear)]
            wanted = [name for name in linear if any(ends_with(name, end) for end in targets)]
            dropout = 0.1 if method.dropout else 0.0
            settings = peft_config(method.algorithm, wanted, rank=rank, alpha=rank, dropout=dropout)
            peft.inject_adapter_in_model(settings, module)
        for weight in [one for one in module.parameters() if one.requires_grad and one.dtype != dtype]:
            weight.data = weight.data.to(dtype)  # of some adapters peft takes over the dtype of the layer
        for layer in module.modules():
            if isinstance(chances := getattr(layer, "module_dropout", None), dict):
                chances.update(dict.fromkeys(chances, _Never()))
        if thin:
            low_memory_linear.make_lean(module)
    finally:
        torch.nn.Module.to = kept


@contextlib.contextmanager
def autocast(dtype: torch.dtype) -> Iterator[None]:
    """What `torch.autocast` does on CUDA to the functions that the networks use: products in `dtype`, normalisations in
    float32.

    torch's own, on the CPU, follows another list.
    """
    names = ("linear", "layer_norm", "group_norm", "scaled_dot_product_attention")
    kept = [getattr(F, name) for name in names]
    convolve = torch.nn.Conv3d._conv_forward

    def low(tensor):
        return tensor.to(dtype) if tensor is not None and tensor.dtype == torch.float32 else tensor

    def high(tensor):
        return tensor.float() if tensor is not None else None

    F.linear = lambda x, weight, bias=None: kept[0](low(x), low(weight), low(bias))
    F.layer_norm = lambda x, shape, weight=None, bias=None, eps=1e-5: kept[1](
        high(x), shape, high(weight), high(bias), eps
    )
    F.group_norm = lambda x, groups, weight=None, bias=None, eps=1e-5: kept[2](
        high(x), groups, high(weight), high(bias), eps
    )
    F.scaled_dot_product_attention = lambda query, key, value, *rest, **more: kept[3](
        low(query), low(key), low(value), *rest, **more
    )
    torch.nn.Conv3d._conv_forward = lambda self, x, weight, bias: convolve(self, low(x), low(weight), low(bias))
    try:
        yield
    finally:
        torch.nn.Conv3d._conv_forward = convolve
        for name, function in zip(names, kept, strict=True):
            setattr(F, name, function)


def train_step(module: torch.nn.Module, point: dict, dtype: torch.dtype) -> Callable[[Tape], None]:
    """Forward, loss in float32, backward; gradients are there from the start, as with accumulation."""
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    for weight in trained:
        weight.grad = torch.empty_like(weight)

    def step(tape: Tape) -> None:
        out = predict(module, point, dtype)
        tape.mark("forward")
        target = torch.empty(out.shape, dtype=torch.float32)
        loss = ((out.float() - target) ** 2).flatten(1).mean(1).sum()
        loss.backward()

    return step
