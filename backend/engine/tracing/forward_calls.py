"""What is traced: networks built on fake tensors, and the calls that Loft makes of them.

A *point* is what a stage's bytes depend on: `h`, `w` latent rows and columns, `f` latent frames, `t` text tokens, `b` pictures that go
through together, `r` LoRA rank. Where a family computes with functions of its own, those functions are called.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from backend.engine.loading.load import checked_network
from backend.engine.tracing.allocation_recorder import Tape, record
from backend.families.qwen_image import vision_example
from backend.planner.costs.model_sizes import published
from backend.planner.costs.training_method import Method
from backend.system.text_files import ends_with

LORA = Method()


def build(network: str, config: dict, dtype: torch.dtype) -> torch.nn.Module:
    """The network "package:Class" with parameters of `dtype`; call it under fake tensors. Sizes that a class keeps in float32 stay so."""
    name, kind = network.rpartition(":")[2], _class_of(network)
    with _default(dtype):
        if hasattr(kind, "config_class"):
            config = {**config, "attn_implementation": "sdpa"}
            module = kind(kind.config_class(**config))
        else:
            module = kind(**config)
    _keep_float32(module)
    if name == "AutoencoderKLQwenImage":
        from backend.families import qwen_image

        qwen_image.prepare("vae", module)
    return module.eval().requires_grad_(False)


def _class_of(network: str) -> type:
    """The class: a network that the estimate knows by name may be spelt by its library alone ("diffusers:AutoencoderKL")."""
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
    """Parameters that the libraries load in float32 whatever is asked for (transformers' plain list is for float16 alone)."""
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
    """Tensors that classes keep beside their parameters and buffers, such as rotary angles: attributes, and lists of them."""
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


def velocity(module: torch.nn.Module, point: dict, dtype: torch.dtype) -> torch.Tensor:
    """One pass through a diffusion transformer at `point`."""
    return _CALLS[type(module).__name__](module, _whole(point), dtype)


def _whole(point: dict) -> dict:
    return {"b": 1, "t": 64, "f": 1, "n": point.get("h", 2) * point.get("w", 2) // 4 * point.get("f", 1), **point}


def _qwen_image(module, point, dtype):
    from backend.families import qwen_image

    batch = point["b"]
    cond = {"embeds": torch.empty(batch, point["t"], module.config.joint_attention_dim, dtype=dtype), "mask": None}
    if batch > 1:
        cond["mask"] = torch.ones(batch, point["t"], dtype=torch.bool)
    x = torch.empty(batch, module.config.in_channels // 4, point["h"], point["w"], dtype=dtype)
    if module.config.use_additional_t_cond or module.config.zero_cond_t:
        return _qwen_image_edit(module, point, dtype, x, cond)
    return qwen_image.predict({"dit": module}, x, torch.empty(batch), cond)


def _qwen_image_edit(module, point, dtype, x, cond):
    from backend.families import qwen_image

    batch = point["b"]
    extra = {}
    if module.config.use_additional_t_cond:
        extra["additional_t_cond"] = torch.zeros(batch, dtype=torch.long)
    return module(
        hidden_states=qwen_image.pack(x),
        timestep=torch.empty(batch, dtype=dtype),
        encoder_hidden_states=cond["embeds"],
        encoder_hidden_states_mask=cond["mask"],
        img_shapes=[[(1, point["h"] // 4, point["w"] // 2), (1, point["h"] // 4, point["w"] // 2)]] * batch,
        return_dict=False,
        **extra,
    )[0]


def _flux(module, point, dtype):
    batch, tokens, said = point["b"], point["n"], module.config
    return module(
        hidden_states=torch.empty(batch, tokens, said.in_channels, dtype=dtype),
        encoder_hidden_states=torch.empty(batch, point["t"], said.joint_attention_dim, dtype=dtype),
        pooled_projections=torch.empty(batch, said.pooled_projection_dim, dtype=dtype),
        timestep=torch.empty(batch, dtype=dtype),
        guidance=torch.empty(batch, dtype=dtype) if said.guidance_embeds else None,
        img_ids=torch.empty(tokens, 3, dtype=dtype),
        txt_ids=torch.empty(point["t"], 3, dtype=dtype),
        return_dict=False,
    )[0]


def _z_image(module, point, dtype):
    batch, said = point["b"], module.config
    pictures = torch.empty(batch, said.in_channels, 1, point["h"], point["w"], dtype=dtype)
    texts = [torch.empty(point["t"], said.cap_feat_dim, dtype=dtype) for _ in range(batch)]
    return torch.stack(module(list(pictures.unbind(0)), torch.empty(batch, dtype=dtype), texts, return_dict=False)[0])


def _wan(module, point, dtype):
    batch, said = point["b"], module.config
    x = torch.empty(batch, said.in_channels, point["f"], point["h"], point["w"], dtype=dtype)
    picture = torch.empty(batch, 257, said.image_dim, dtype=dtype) if said.image_dim else None
    text = torch.empty(batch, 512, said.text_dim, dtype=dtype)
    return module(x, torch.empty(batch), text, encoder_hidden_states_image=picture, return_dict=False)[0]


_CALLS = {
    "QwenImageTransformer2DModel": _qwen_image,
    "FluxTransformer2DModel": _flux,
    "ZImageTransformer2DModel": _z_image,
    "WanTransformer3DModel": _wan,
}


def encode_text(module: torch.nn.Module, point: dict, dtype: torch.dtype) -> torch.Tensor:
    """Text tokens (b, t) through a text encoder as the families call it (no key-value cache, last states)."""
    ids = torch.zeros(point.get("b", 1), point["t"], dtype=torch.long)
    kind = type(module).__name__
    if kind.startswith(("T5", "UMT5")):
        return module(input_ids=ids, attention_mask=None).last_hidden_state
    if kind == "CLIPTextModel":
        return module(input_ids=torch.zeros(point.get("b", 1), 77, dtype=torch.long)).last_hidden_state
    if kind == "CLIPVisionModel":
        size = module.config.image_size
        return module(
            torch.empty(point.get("b", 1), 3, size, size, dtype=dtype), output_hidden_states=True
        ).hidden_states[-2]
    if kind == vision_example.KIND:
        return vision_example.see(module, point, dtype)
    if kind == "Qwen2_5_VLModel":
        module = module.language_model
    with _one_prompt_a_row():
        return module(input_ids=ids, attention_mask=None, use_cache=False).last_hidden_state


@contextlib.contextmanager
def _one_prompt_a_row() -> Iterator[None]:
    """transformers looks at the numbers of positions to see whether rows are packed; fake tensors have none, and none are packed."""
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
    kind = type(module).__name__
    if kind == "AutoencoderKL":
        module.use_tiling, module.tile_sample_min_size, module.tile_latent_min_size = tiled, 512, 64
        return module.decode(
            torch.empty(batch, said.latent_channels, point["h"], point["w"], dtype=dtype), return_dict=False
        )[0]
    if kind == "AutoencoderKLQwenImage":
        from backend.families import qwen_image

        return qwen_image.decode(
            {"vae": module}, torch.empty(batch, said.z_dim, point["h"], point["w"], dtype=dtype), tiled=tiled
        )
    module.use_tiling = tiled
    z = torch.empty(batch, said.z_dim, point.get("f", 1), point["h"], point["w"], dtype=dtype)
    return module.decode(z, return_dict=False)[0]


def encode_image(module: torch.nn.Module, point: dict, dtype: torch.dtype) -> torch.Tensor:
    """Pixels of the size that `point` decodes to, to latents."""
    kind, batch, side = type(module).__name__, point.get("b", 1), _pixels_per_cell(module)
    shape = (point["h"] * side, point["w"] * side)
    if kind == "AutoencoderKL":
        return module.encode(torch.empty(batch, 3, *shape, dtype=dtype), return_dict=False)[0].mean
    if kind == "AutoencoderKLQwenImage":
        from backend.families import qwen_image

        return qwen_image.encode_image(
            {"vae": module}, torch.empty(batch, module.config.input_channels, *shape, dtype=dtype)
        )
    frames = 4 * (point.get("f", 1) - 1) + 1
    return module.encode(torch.empty(batch, 3, frames, *shape, dtype=dtype), return_dict=False)[0].mean


def _pixels_per_cell(module) -> int:
    return getattr(module.config, "scale_factor_spatial", None) or 8


class _Never:
    """In the place of the chance with which peft leaves an adapter out: it compares that with a number drawn, and fake tensors have none."""

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
    """Adapters of `rank` on the linear layers whose names end in `targets`, with weights of `dtype`; `thin` as the trainer makes them."""
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
    """What `torch.autocast` does on CUDA to the functions that the networks use: products in `dtype`, normalisations in float32.

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
        out = velocity(module, point, dtype)
        tape.mark("forward")
        target = torch.empty(out.shape, dtype=torch.float32)
        loss = ((out.float() - target) ** 2).flatten(1).mean(1).sum()
        loss.backward()

    return step
