"""Qwen-Image: text-to-image, image-to-image and editing, as diffusers' QwenImagePipeline, QwenImageImg2ImgPipeline,
QwenImageEditPipeline and QwenImageEditPlusPipeline compute them.

Shapes: B pictures, C latent channels, h x w latent cells (8 pixels a side), S = h/2 * w/2 tokens, L text tokens, D text width.
Qwen2.5-VL is two parts: its language half (`text_encoder`), and for the variants that edit its vision tower (`vision`). Its
`lm_head` has no part in making a picture.

Read: files, prompt_template, text_encoder, reference_geometry, reference_images, vae, cpu_attention, vision_example.
Public: prompt_template, reference_geometry, cpu_attention, vision_example.
"""

from __future__ import annotations

import math

from backend.catalog.family import (
    CachedBlocks,
    Defaults,
    DrawSettings,
    LoraTargets,
    NameMap,
    Part,
    SizeRule,
    TextSign,
    Tokenizer,
    TrainingSchedule,
)
from backend.catalog.lora.module_names import DECODER
from backend.families._shared.flow_schedule import flow_sigmas
from backend.families._shared.packing import latent_shape, pack, unpack
from backend.families.qwen_image.cpu_attention import MAX_TOKENS as CPU_ATTENTION_TOKENS
from backend.families.qwen_image.cpu_attention import use_cpu_attention
from backend.families.qwen_image.files import (
    EDIT_HINT,
    EDITING,
    EDITS,
    LORA_SIGNS,
    SIGNATURES,
    VARIANT_CONFIG,
    config_from_shapes,
    original_vae,
    tell_variant,
)
from backend.families.qwen_image.prompt_template import count_tokens, most_tokens
from backend.families.qwen_image.reference_geometry import (
    edited_size,
    reference_pixels,
    reference_sizes,
    reference_tokens,
    seen_tokens,
)
from backend.families.qwen_image.reference_images import encode_references, load_processor
from backend.families.qwen_image.text_encoder import encode_text, load_tokenizer, truncated
from backend.families.qwen_image.vae import TILES, decode, encode_image, use_flat_convolutions
from backend.families.qwen_image.vision_example import trace_encoder
from backend.schema.messages import Trouble

__all__ = [
    "CPU_ATTENTION_TOKENS",
    "EDITS",
    "EDIT_HINT",
    "LORA_SIGNS",
    "SIGNATURES",
    "TILES",
    "VARIANT_CONFIG",
    "config_from_shapes",
    "count_tokens",
    "decode",
    "edited_size",
    "encode_image",
    "encode_references",
    "encode_text",
    "latent_shape",
    "load_processor",
    "load_tokenizer",
    "most_tokens",
    "pack",
    "reference_pixels",
    "reference_sizes",
    "reference_tokens",
    "seen_tokens",
    "tell_variant",
    "trace_encoder",
    "truncated",
    "unpack",
    "use_cpu_attention",
]

NAME = "qwen_image"
COUNTS_TOKENS = True  # the templates around a prompt are known: `prompt_template`
TITLE = "Qwen-Image"
WORDS = ("qwen-image", "qwen_image", "qwenimage")  # how metadata of LoRA files names it, in lower case

PIPELINE = "QwenImagePipeline"
DIFFSYNTH_SCHEDULES = {
    "Qwen-Image": {},
    # lightx2v's distilled models: all sizes are shifted by log 3, and the end is not stretched
    "Qwen-Image-Lightning": {"base_shift": math.log(3), "max_shift": math.log(3), "shift_terminal": None},
}
DIFFSYNTH_ABSENT = {
    "QwenImageBlockWiseControlNet": "ControlNets are not read; pictures are drawn from text, input_image and edit_image",
    "QwenImageUnit_Image2LoRAEncode": "a LoRA is not made from pictures without training",
    "QwenImageUnit_Image2LoRADecode": "a LoRA is not made from pictures without training",
}
PIPELINE_DEFAULTS = {"num_inference_steps": 30}  # as a script for DiffSynth-Studio that names none means

DRAWS = True
NOT_DRAWN = ("layered",)  # variants that need more than a prompt

PARTS = {
    "dit": Part(
        network="diffusers.models.transformers.transformer_qwenimage:QwenImageTransformer2DModel",
        folder="transformer",
        phase="denoise",
        blocks=("transformer_blocks",),
        prefixes=("model.diffusion_model.", "diffusion_model.", "transformer.", "model."),
        keep_precise=("norm", "pos_embed", "img_in", "txt_in", "time_text_embed", "proj_out"),
    ),
    "text_encoder": Part(
        network="transformers.models.qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VLTextModel",
        folder="text_encoder",
        phase="text",
        blocks=("layers",),
        config_key="text_config",
        prefixes=("model.language_model.", "language_model.", "model."),
        unused=("visual.", "lm_head."),
        keep_precise=("norm", "embed_tokens", "rotary_emb"),
    ),
    "vision": Part(
        network="transformers.models.qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VisionTransformerPretrainedModel",
        folder="text_encoder",
        phase="text",
        variants=EDITING,
        for_pictures=True,
        label="vision tower",
        blocks=("blocks",),
        config_key="vision_config",
        prefixes=("model.visual.", "visual."),
        keep_precise=("norm", "patch_embed", "merger"),
    ),
    "vae": Part(
        network="diffusers.models.autoencoders.autoencoder_kl_qwenimage:AutoencoderKLQwenImage",
        folder="vae",
        phase="decode",
        keep_precise=("norm",),
    ),
}
TOKENIZERS = {"tokenizer": Tokenizer("tokenizer", usual=("Qwen/Qwen-Image", "tokenizer/"))}

NAME_MAPS = (NameMap("wan", "vae", original_vae()),)  # the transformer has one naming everywhere

_ATTENTION = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out")
LORA = LoraTargets(
    part="dit",
    presets={
        "all": (*_ATTENTION, "img_mlp.net.2", "img_mod.1", "txt_mlp.net.2", "txt_mod.1"),
        "attention": _ATTENTION,
        "attention_and_mlp": (
            *_ATTENTION,
            "img_mlp.net.0.proj",
            "img_mlp.net.2",
            "txt_mlp.net.0.proj",
            "txt_mlp.net.2",
        ),
    },
    default="all",
)

DEFAULTS = Defaults(request={"width": 1328, "height": 1328, "num_inference_steps": 40, "guidance": 4.0})
SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}
CACHED_BLOCKS = (CachedBlocks("transformer_blocks", ("encoder_hidden_states", "hidden_states")),)
COMPUTE_DTYPES = ("bfloat16", "float32")  # activations leave float16's range
LORA_TEXT_SIGNS = (TextSign(DECODER, (3584, 18944)),)
LORA_TEXT_NAMES = {"comfyui": {"text_encoder": "qwen25_7b"}}
SIZES = SizeRule(multiple=16, pixels=1328 * 1328)
TRAINING_SCHEDULE = TrainingSchedule(shift=math.exp(0.8), terminal=0.02)  # at every size, as DiffSynth-Studio trains it


def prepare(part: str, module) -> None:
    """Makes a freshly built part quicker without changing what it computes or how its parameters are called."""
    if part == "vae":
        use_flat_convolutions(module)


def collate(encodings, settings: DrawSettings, *, branch=None, device=None, dtype=None) -> dict:
    """Encodings of `encode_text` side by side: {"embeds": (B, L, D), "mask": (B, L) bool, or None where none is padded}, and, where
    encodings have "references" (of `encode_references`), those as a tuple of (B, C, h_i, w_i). Raises Trouble where they differ in shape."""
    import torch

    embeds = [encoding["embeds"].to(device=device, dtype=dtype) for encoding in encodings]
    lengths = [len(rows) for rows in embeds]
    padded = torch.nn.utils.rnn.pad_sequence(embeds, batch_first=True)
    cond = {"embeds": padded, "mask": None}
    if min(lengths) != max(lengths):
        places = torch.arange(padded.shape[1], device=padded.device)
        cond["mask"] = places[None] < torch.tensor(lengths, device=padded.device)[:, None]
    references = [tuple(encoding.get("references") or ()) for encoding in encodings]
    if any(references):
        cond["references"] = _references_together(references, device=device, dtype=dtype)
    return cond


def _references_together(references: list[tuple], *, device, dtype) -> tuple:
    import torch

    shapes = {tuple(tuple(one.shape) for one in some) for some in references}
    if len(shapes) > 1:
        sizes = " and ".join(sorted(", ".join(f"{w * 8} x {h * 8}" for _, h, w in some) or "none" for some in shapes))
        raise Trouble(
            "bad_value",
            f"Samples that go through the model together need pictures to edit of the same sizes, and these have {sizes}.",
            hint="Take them one at a time (batch size 1).",
        )
    return tuple(torch.stack(same).to(device=device, dtype=dtype) for same in zip(*references, strict=True))


def predict(parts: dict, x, sigma, cond: dict, *, part: str = "dit", sigma_next=None):
    """The velocity (noise - picture) at `x` (B, C, h, w) and `sigma` (B,) in [0, 1], given `collate`'s `cond`. Differentiable.

    The tokens of `cond["references"]` stand behind the picture's, each reference in a grid of its own; Edit-2511 (`zero_cond_t`) takes
    them as free of noise, which its network does by these grids.
    """
    import torch

    height, width = x.shape[-2] // 2, x.shape[-1] // 2
    references = cond.get("references") or ()
    grids = [(1, one.shape[-2] // 2, one.shape[-1] // 2) for one in (x, *references)]
    tokens = pack(x)
    if references:
        tokens = torch.cat([tokens, *(pack(one.to(x.dtype)) for one in references)], dim=1)
    timestep = (sigma * 1000).to(x.dtype) / 1000  # in this order, so that it rounds as in diffusers
    velocity = parts[part](
        hidden_states=tokens,
        timestep=timestep,
        encoder_hidden_states=cond["embeds"],
        encoder_hidden_states_mask=cond["mask"],
        img_shapes=[grids] * x.shape[0],
        return_dict=False,
        **{name: cond[name] for name in ("additional_t_cond",) if name in cond},
    )[0]
    return unpack(velocity[:, : height * width], height, width)


def guide(predictions, scale: float, *, x, sigma):
    """True classifier-free guidance on velocities (B, C, h, w): each token keeps the length it has without guidance."""
    import torch

    height, width = x.shape[-2] // 2, x.shape[-1] // 2
    positive, negative = pack(predictions["positive"]), pack(predictions["negative"])
    combined = negative + scale * (positive - negative)
    lengths = torch.norm(positive, dim=-1, keepdim=True), torch.norm(combined, dim=-1, keepdim=True)
    return unpack(combined * (lengths[0] / lengths[1]), height, width)


def sigmas(settings: DrawSettings, num_steps: int):
    """Noise levels (num_steps + 1,) float32 from 1 down to 0, as diffusers' scheduler with this configuration sets them."""
    import numpy

    levels = numpy.linspace(1.0, 1 / num_steps, num_steps)
    tokens = SIZES.tokens(settings.width, settings.height)
    return flow_sigmas(settings.scheduler or SCHEDULER, levels, tokens=tokens)


def example_inputs(module, point, dtype):
    """A point's tensors without numbers. Of Edit-2511 and Layered half of the rows are a reference, so that what only they compute is traced."""
    import torch

    batch, said = point["b"], module.config
    shape = (batch, said.in_channels // 4, point["h"], point["w"])
    cond = {"embeds": torch.empty(batch, point["t"], said.joint_attention_dim, dtype=dtype), "mask": None}
    if batch > 1:
        cond["mask"] = torch.ones(batch, point["t"], dtype=torch.bool)
    if said.use_additional_t_cond:
        cond["additional_t_cond"] = torch.zeros(batch, dtype=torch.long)
    if said.use_additional_t_cond or said.zero_cond_t:
        rows = 2 * (point["h"] // 4)
        cond["references"] = (torch.empty(*shape[:2], rows, shape[3], dtype=dtype),)
        shape = (*shape[:2], shape[2] - rows, shape[3])
    return torch.empty(shape, dtype=dtype), torch.empty(batch), cond
