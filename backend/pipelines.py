"""The Python API, in the shapes that users of DiffSynth-Studio know.

from backend.catalog.family import Family, Latents, each_stream
from backend.pipelines import QwenImagePipeline, ModelConfig

pipe = QwenImagePipeline.from_pretrained(
    torch_dtype=torch.bfloat16, device="cuda",
    model_configs=[ModelConfig(model_id="loft/starter", origin_file_pattern="transformer/*.safetensors"), ...],
)
pipe("a red apple", seed=0).save("image.png")
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from PIL import Image

from backend import families
from backend.catalog.family import Family, Latents, each_stream
from backend.catalog.models import model_folder
from backend.engine.acceleration import apply
from backend.engine.api import arguments, diffsynth_arguments, diffsynth_names
from backend.engine.api.diffsynth_names import FlowMatchScheduler, absent
from backend.engine.api.load_state_dict import load_state_dict as load_state_dict
from backend.engine.api.model_config import ModelConfig, check_one, identify, tell_idle_limit
from backend.engine.api.save_quantized import save_quantized_model as save_quantized_model
from backend.engine.devices import device_memory
from backend.engine.pipeline.latent_preview import Step
from backend.engine.pipeline.pipeline import Pipeline
from backend.engine.quantization.config import MixedQuantizeConfig as MixedQuantizeConfig
from backend.engine.quantization.config import QuantizeConfig as QuantizeConfig
from backend.engine.quantization.config import describe_quant_method as describe_quant_method
from backend.schema.messages import Trouble
from backend.schema.request import GenerationRequest, LoraReceipt
from backend.schema.settings import from_values


class ImagePipeline:
    """A model of one family; `from_pretrained` makes it, calling it draws. Its parts are attributes (`dit`, `text_encoder`, `vae`,
    `tokenizer`, `processor`), None where they were not given. Called on this class itself, `from_pretrained` finds the family from the files."""

    family: Family
    usual: Mapping[str, object] = MappingProxyType({})  # defaults of a call that differ from the page's

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        self.defaults = model_folder.request_defaults(pipeline.spec, self.family, usual=self.usual)
        self.compile = False  # the transformer's repeated block, from the next picture on
        self.scheduler = FlowMatchScheduler()  # the model's own noise schedule

    @classmethod
    def from_pretrained(
        cls,
        torch_dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "auto",
        model_configs: Iterable[ModelConfig] = (),
        tokenizer_config: ModelConfig | None = None,
        processor_config: ModelConfig | None = None,
        vram_limit: float | None = None,
        compile: bool = False,
        fp8_products: bool = False,
        **others,
    ) -> ImagePipeline:
        """Loads what `model_configs` name, in any order and any selection of parts.

        `tokenizer_config` None: the tokenizer beside the parts, if there is one; so `processor_config`, of models that edit pictures, whose
        folder also has a tokenizer. `vram_limit`: GiB that weights may take on the
        computing device for the *preparing* state; None is no limit, 0 prepares nothing. `compile`: the transformer's repeated block, at its
        first step. `fp8_products`: the transformer is stored in FP8 and multiplies in FP8; faster and less exact.
        """
        diffsynth_arguments.refuse(others, {}, arguments.words_of(cls.from_pretrained), what="from_pretrained")
        arguments.check_switches(compile=compile, fp8_products=fp8_products)
        apply.check(device_memory.check_device(str(device)), compile=compile, fp8_products=fp8_products)
        known = (cls.family,) if hasattr(cls, "family") else families.FAMILIES
        arguments.check_dtype(torch_dtype)
        limit = arguments.limit_bytes(vram_limit)
        spec, configs, loading = identify(model_configs, known, lambda family: _pipeline_of(family).__name__)
        if not hasattr(cls, "family"):
            cls = _pipeline_of(spec.family)
        for setting, config in (("tokenizer_config", tokenizer_config), ("processor_config", processor_config)):
            if config is not None:
                check_one(config, setting)
        if tokenizer_config is not None:
            spec = replace(spec, tokenizers=spec.tokenizers | {"tokenizer": tokenizer_config.folder()})
        if processor_config is not None:
            folder = processor_config.folder()
            spec = replace(spec, processor=folder, tokenizers={"tokenizer": folder} | spec.tokenizers)
        with arguments.shortage_in_words("loading", device):
            pipeline = Pipeline(
                spec,
                dtype=torch_dtype,
                device=device,
                configs=configs,
                vram_limit_bytes=limit,
                fp8_products=fp8_products,
                loading=loading,
            )
        tell_idle_limit(pipeline)
        made = cls(pipeline)
        made.compile = compile
        return made

    def __getattr__(self, name: str):
        family = type(self).family
        if name == "unet" and family.PARTS["dit"].folder == "unet":
            name = "dit"
        if name in ("tokenizer", "processor") or name in family.PARTS:
            return self.__dict__["pipeline"].parts.get(name) if "pipeline" in self.__dict__ else None
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def notes(self) -> list[str]:
        """What is to be said about the last picture: what was cut off, done again for lack of memory, or computed less exactly."""
        return self.pipeline.notes

    def __call__(
        self,
        prompt: str = "",
        negative_prompt: str = "",
        cfg_scale: float | None = None,
        input_image: Image.Image | str | Path | None = None,
        denoising_strength: float = 1.0,
        edit_image: Image.Image | str | Path | Sequence[Image.Image | str | Path] | None = None,
        height: int | None = None,
        width: int | None = None,
        seed: int | None = None,
        rand_device: str | torch.device = "cpu",
        num_inference_steps: int | None = None,
        tiled: bool | None = None,
        tile_size: int | None = None,
        tile_stride: int | None = None,
        step_cache: float = 0.0,
        exponential_shift_mu: float | None = None,
        on_step: Callable[[Step], None] | None = None,
        progress_bar_cmd=None,
        **others,
    ) -> Image.Image:
        """One picture. What is None is the model's own default (for a seed: a random one). A width or height that the model cannot have is
        rounded up to the next one that it can, with a note.

        `edit_image`: the picture or pictures that a model that edits works from; size and proportions are the (last)
        picture's, at about a million pixels, where `height` and `width` are None. `rand_device`: where noise is drawn; on the CPU a seed means the same picture on every device. `tile_size` and `tile_stride` are latent
        cells (8 pixels), and count where `tiled`. `step_cache`: above 0, steps that change little reuse an earlier one; faster, less exact.
        `exponential_shift_mu`: the shift of the noise schedule, whatever the picture's size.
        """
        if others.get("zero_cond_t") is True and getattr(getattr(self.dit, "config", None), "zero_cond_t", False):
            del others["zero_cond_t"]  # as the model's own configuration says
        diffsynth_arguments.refuse(
            others, diffsynth_arguments.CALL, arguments.words_of(ImagePipeline.__call__), what="A picture"
        )
        arguments.check_call(
            input_image=input_image,
            tiled=tiled,
            tile_size=tile_size,
            tile_stride=tile_stride,
            on_step=on_step,
            bar=progress_bar_cmd,
        )
        asked = {"guidance": cfg_scale, "height": height, "width": width, "num_inference_steps": num_inference_steps}
        edited = arguments.pictures_of(edit_image)
        values = {
            **self.defaults,
            **self._size_of(edited),
            **{name: value for name, value in asked.items() if value is not None},
        }
        rounded = arguments.round_up(values, multiple=self.family.sizes(self.pipeline.spec.variant).multiple)
        values |= {
            "prompt": prompt,
            "negative_prompt": negative_prompt,
            "seed": random.randrange(2**32) if seed is None else seed,
            "denoising_strength": denoising_strength,
            "input_image": str(input_image) if isinstance(input_image, str | Path) else None,
            "step_cache": step_cache,
            "compile": self.compile,
            "fp8_products": self.pipeline.fp8_products,
        }
        request = from_values(GenerationRequest, values)
        self.pipeline.notes.clear()
        for note in rounded:
            self.pipeline.notes.append(note)
            warnings.warn(note, stacklevel=2)
        source = arguments.picture_of(input_image) if isinstance(input_image, Image.Image) else None
        tiles = diffsynth_arguments.tiles(tile_size, tile_stride) if tiled and (tile_size or tile_stride) else tiled
        noise = None if str(rand_device) == "cpu" else self._noise(request, rand_device)
        bar = arguments.Progress(progress_bar_cmd, request.num_inference_steps, on_step)
        shift = diffsynth_names.shifted(self.pipeline.spec.scheduler, exponential_shift_mu)
        self.pipeline.schedule = {**self.scheduler.changes, **shift}
        with arguments.shortage_in_words("drawing", self.pipeline.device), bar as step:
            return next(
                self.pipeline.draw(request, source=source, edited=edited, on_step=step, tiled=tiles, noise=noise)
            )

    def _size_of(self, edited: Sequence[Image.Image]) -> dict[str, int]:
        """Width and height of what is made of pictures to edit; nothing where there are none."""
        processor: Any = self.pipeline.parts.get("processor")
        if not edited or processor is None:
            return {}
        sizes, variant = [one.size for one in edited], self.pipeline.spec.variant
        width, height = self.family.edited_size(sizes, variant, processor.reference_pixels)
        return {"width": width, "height": height}

    def _noise(self, request: GenerationRequest, device: str | torch.device) -> Latents:
        device = device_memory.check_device(str(device))
        generator = torch.Generator(device).manual_seed(request.seed)
        shape = self.family.latent_shape(self.pipeline.settings(request))
        return each_stream(lambda one: torch.randn((1, *one), generator=generator, device=device), shape)

    def load_lora(
        self,
        module: torch.nn.Module,
        lora_config: ModelConfig | str | Path | dict[str, torch.Tensor] | None = None,
        alpha: float = 1.0,
        hotload: bool | None = None,
        state_dict: dict[str, torch.Tensor] | None = None,
        verbose: int = 0,
    ) -> LoraReceipt:
        """Adds a LoRA (a file, a ModelConfig, or a state dict) to `module`, one of this pipeline's parts, at strength `alpha`.

        `hotload` None: beside the weights where these are placed or stored in 8 bits or `enable_lora_hotloading` was called, else
        fused into them. Returns what was matched, which `verbose` prints; raises Trouble, and changes nothing, where nothing was.
        """
        source = state_dict if state_dict is not None else lora_config
        if isinstance(source, ModelConfig):
            source = source.files()[0]
        if not isinstance(source, str | Path | dict):
            given = "nothing" if source is None else f"{source!r:.80}"
            raise Trouble("bad_value", f"load_lora needs a file or a state dict, and was given {given}.")
        with arguments.shortage_in_words("adding a LoRA", self.pipeline.device):
            receipt = self.pipeline.add_lora(self._part_of(module), source, strength=alpha, hot=hotload)
        if verbose:
            print(f"{receipt.name}: {receipt.layers_applied} of {receipt.layers_found} layers, {receipt.mode}")
        return receipt

    def set_lora_strength(self, which: LoraReceipt | str | Path, alpha: float) -> LoraReceipt:
        """A loaded LoRA (its receipt, path or name) at another strength; the file of a hot one is not read again."""
        return self.pipeline.set_lora_strength(str(which) if isinstance(which, Path) else which, alpha)

    def remove_lora(self, which: LoraReceipt | str | Path) -> None:
        """Takes one LoRA off; the others stay as they are."""
        self.pipeline.remove_lora(str(which) if isinstance(which, Path) else which)

    def clear_lora(self, module: torch.nn.Module | None = None, verbose: int = 0) -> None:
        """Takes all LoRAs off again (of `module` only, if given); fused weights are read anew from their file, bit for bit."""
        self.pipeline.clear_loras(None if module is None else self._part_of(module))
        if verbose:
            print(
                "All LoRAs are taken off." if module is None else f"All LoRAs of {self._part_of(module)} are taken off."
            )

    def enable_lora_hotloading(self, module: torch.nn.Module | None = None) -> torch.nn.Module | None:
        """From now on LoRAs for `module` (or any part) act beside its weights unless `hotload=False` is said. Returns `module`."""
        self.pipeline.prefer_hot(None if module is None else self._part_of(module))
        return module

    enable_lora_hot_loading = enable_lora_hotloading

    def compile_pipeline(self, **options) -> None:
        """As `from_pretrained(compile=True)`, later: the repeated block is compiled at the next picture. Takes DiffSynth's options at the
        values that are true of it."""
        diffsynth_arguments.refuse(
            options, diffsynth_arguments.COMPILE, diffsynth_arguments.COMPILE, what="compile_pipeline"
        )
        apply.check(self.pipeline.device, compile=True, fp8_products=False)
        self.compile = True

    def enable_vram_management(self, **_) -> None:
        """An older way of DiffSynth's; raises Trouble with the way that works."""
        raise Trouble(
            "not_supported",
            "Weights are placed while they are loaded, so there is nothing to switch on afterwards.",
            hint="Give ModelConfig the states (offload_device=...) and from_pretrained a vram_limit.",
        )

    def _part_of(self, module: torch.nn.Module) -> str:
        for name, part in self.pipeline.parts.items():
            if part is module:
                return name
        raise Trouble(
            "bad_value", "That module is none of this pipeline's parts.", hint="Pass pipe.dit or pipe.text_encoder."
        )


def _class_of(family: Family) -> type[ImagePipeline]:
    """The class of a family's models, which its `PIPELINE` names."""
    draws = "draws" if family.DRAWS else "is looked at, and LoRA files are put on it; it draws no pictures yet"
    members = {
        "__doc__": f"{family.TITLE}: {draws}.",
        "__module__": __name__,
        "family": family,
        "usual": MappingProxyType(dict(family.PIPELINE_DEFAULTS)),
    }
    return type(family.PIPELINE, (ImagePipeline,), members)


PIPELINES = {family.PIPELINE: _class_of(family) for family in families.FAMILIES if family.PIPELINE}
globals().update(PIPELINES)


def __getattr__(name: str):
    """Raises Trouble for what DiffSynth-Studio's scripts import and there is nothing for."""
    absent(name)


def _pipeline_of(family: str) -> type[ImagePipeline]:
    return PIPELINES[families.by_name(family).PIPELINE]
