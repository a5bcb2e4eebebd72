"""The Python API, in the shapes that users of DiffSynth-Studio know.

from backend.pipelines import QwenImagePipeline, ModelConfig

pipe = QwenImagePipeline.from_pretrained(
    torch_dtype=torch.bfloat16, device="cuda",
    model_configs=[ModelConfig(model_id="loft/starter", origin_file_pattern="transformer/*.safetensors"), ...],
)
pipe("a red apple", seed=0).save("image.png")
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch
from PIL import Image

from backend import families
from backend.catalog import beside, download
from backend.catalog.identify import identify_files
from backend.catalog.spec import ModelSpec
from backend.engine.pipeline import Pipeline
from backend.engine.preview import Step
from backend.schema.messages import Trouble
from backend.schema.request import GenerationRequest, LoraReceipt
from backend.schema.vram import VramConfig

GIB = 2**30


@dataclass(frozen=True)
class ModelConfig:
    """Files, and where their weights are to lie.

    Either `path` (a file, a list of shards, or a folder) or `model_id` with `origin_file_pattern` (wildcards; a list of them; a
    trailing slash means the folder): looked for on this machine first, then downloaded. The eight fields of the four states are
    those of `VramConfig`; dtypes may be torch's.
    """

    path: str | Path | Sequence[str | Path] | None = None
    model_id: str | None = None
    origin_file_pattern: str | Sequence[str] | None = None
    download_source: str | None = None
    local_model_path: str | Path | None = None
    skip_download: bool | None = None
    offload_device: str | torch.device | None = None
    offload_dtype: torch.dtype | str | None = None
    onload_device: str | torch.device | None = None
    onload_dtype: torch.dtype | str | None = None
    preparing_device: str | torch.device | None = None
    preparing_dtype: torch.dtype | str | None = None
    computation_device: str | torch.device | None = None
    computation_dtype: torch.dtype | str | None = None

    def files(self) -> list[Path]:
        """The files (or folders) meant, all of them on this machine afterwards. Raises Trouble."""
        if self.path is not None:
            paths = [self.path] if isinstance(self.path, str | Path) else list(self.path)
            for path in paths:
                if not Path(path).exists():
                    raise Trouble("missing_file", f"There is no file {path}.", hint="Check ModelConfig(path=...).")
            return [Path(path) for path in paths]
        if self.model_id is None:
            raise Trouble("bad_value", "A ModelConfig needs `path`, or `model_id` with `origin_file_pattern`.")
        patterns = self.origin_file_pattern or ""
        found = []
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            found += download.resolve(
                self.model_id,
                pattern,
                folders=[Path(self.local_model_path)] if self.local_model_path else [],
                source=self.download_source,
                offline=self.skip_download,
            )
        return found

    def vram(self) -> VramConfig:
        return VramConfig(**{name: _word(getattr(self, name)) for name in VramConfig.__dataclass_fields__})


def _word(value) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")


class ImagePipeline:
    """A model of one family; `from_pretrained` makes it, calling it draws. Its parts are attributes (`dit`, `text_encoder`, `vae`,
    `tokenizer`), None where they were not given. Called on this class itself, `from_pretrained` finds the family from the files."""

    family: ModuleType

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        self.defaults = beside.request_defaults(pipeline.spec, self.family)

    @classmethod
    def from_pretrained(
        cls,
        torch_dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "auto",
        model_configs: Iterable[ModelConfig] = (),
        tokenizer_config: ModelConfig | None = None,
        vram_limit: float | None = None,
    ) -> ImagePipeline:
        """Loads what `model_configs` name, in any order and any selection of parts.

        `tokenizer_config` None: the tokenizer beside the parts, if there is one. `vram_limit`: GiB that weights may take on the
        computing device for the *preparing* state; None is no limit, 0 prepares nothing.
        """
        spec, configs = cls._identify(model_configs)
        if not hasattr(cls, "family"):
            cls = _pipeline_of(spec.family)
        if tokenizer_config is not None:
            spec = replace(spec, tokenizer=_folder(tokenizer_config.files()))
        limit = None if vram_limit is None else int(vram_limit * GIB)
        return cls(Pipeline(spec, dtype=torch_dtype, device=device, configs=configs, vram_limit_bytes=limit))

    @classmethod
    def _identify(cls, model_configs: Iterable[ModelConfig]) -> tuple[ModelSpec, dict[str, VramConfig]]:
        parts, configs, spec = {}, {}, None
        known = (cls.family,) if hasattr(cls, "family") else families.FAMILIES
        for config in model_configs:
            found = _found(_expanded(config.files()), known)
            for name, part in found.parts.items():
                if name in parts:
                    raise Trouble(
                        "bad_value", f"Two model configs bring the part {name}.", hint="Leave one of them out."
                    )
                parts[name], configs[name] = part, config.vram()
            spec = found if spec is None or "dit" in found.parts else spec
        if spec is None:
            raise Trouble("bad_value", "model_configs is empty.", hint="Name at least the transformer's file.")
        family = families.by_name(spec.family)
        missing = tuple(name for name, part in family.PARTS.items() if part.needed and name not in parts)
        return beside.completed(replace(spec, parts=parts, missing=missing, path=None), family), configs

    def __getattr__(self, name: str):
        family = type(self).family
        if name == "unet" and family.PARTS["dit"].folder == "unet":
            name = "dit"
        if name == "tokenizer" or name in family.PARTS:
            return self.__dict__["pipeline"].parts.get(name) if "pipeline" in self.__dict__ else None
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __call__(
        self,
        prompt: str,
        negative_prompt: str = "",
        cfg_scale: float | None = None,
        input_image: Image.Image | str | Path | None = None,
        denoising_strength: float = 1.0,
        height: int | None = None,
        width: int | None = None,
        seed: int | None = None,
        num_inference_steps: int | None = None,
        tiled: bool | None = None,
        on_step: Callable[[Step], None] | None = None,
        progress_bar_cmd=None,
    ) -> Image.Image:
        """One picture. What is None is the model's own default (for a seed: a random one)."""
        asked = {"guidance": cfg_scale, "height": height, "width": width, "num_inference_steps": num_inference_steps}
        values = {**self.defaults, **{name: value for name, value in asked.items() if value is not None}}
        request = GenerationRequest(
            prompt=prompt,
            negative_prompt=negative_prompt,
            seed=random.randrange(2**32) if seed is None else seed,
            denoising_strength=denoising_strength,
            input_image=str(input_image) if isinstance(input_image, str | Path) else None,
            **values,
        )
        source = input_image if isinstance(input_image, Image.Image) else None
        with _Progress(progress_bar_cmd, request.num_inference_steps, on_step) as step:
            return next(self.pipeline.draw(request, source=source, on_step=step, tiled=tiled))

    def load_lora(
        self,
        module: torch.nn.Module,
        lora_config: ModelConfig | str | Path | None = None,
        alpha: float = 1.0,
        hotload: bool | None = None,
        state_dict: dict[str, torch.Tensor] | None = None,
    ) -> LoraReceipt:
        """Adds a LoRA (a file, a ModelConfig, or a state dict) to `module`, one of this pipeline's parts, at strength `alpha`.

        `hotload` None: beside the weights where these are placed or stored in 8 bits or `enable_lora_hotloading` was called, else
        fused into them. Returns what was matched; raises Trouble, and changes nothing, where nothing was.
        """
        source = state_dict if state_dict is not None else lora_config
        if isinstance(source, ModelConfig):
            source = source.files()[0]
        if source is None:
            raise Trouble("bad_value", "load_lora needs a file or a state dict.")
        return self.pipeline.add_lora(self._part_of(module), source, strength=alpha, hot=hotload)

    def clear_lora(self, module: torch.nn.Module | None = None) -> None:
        """Takes all LoRAs off again (of `module` only, if given); fused weights are read anew from their file, bit for bit."""
        self.pipeline.clear_loras(None if module is None else self._part_of(module))

    def enable_lora_hotloading(self, module: torch.nn.Module | None = None) -> None:
        """From now on LoRAs for `module` (or any part) act beside its weights unless `hotload=False` is said."""
        self.pipeline.prefer_hot(None if module is None else self._part_of(module))

    def _part_of(self, module: torch.nn.Module) -> str:
        for name, part in self.pipeline.parts.items():
            if part is module:
                return name
        raise Trouble(
            "bad_value", "That module is none of this pipeline's parts.", hint="Pass pipe.dit or pipe.text_encoder."
        )


class QwenImagePipeline(ImagePipeline):
    """Qwen-Image and models of its architecture."""

    family = families.by_name("qwen_image")


class FluxImagePipeline(ImagePipeline):
    """FLUX.1's transformer, to look at and to put LoRA files on; it draws no pictures yet."""

    family = families.by_name("flux")


class Flux2ImagePipeline(ImagePipeline):
    """FLUX.2's transformer, likewise."""

    family = families.by_name("flux2")


class ZImagePipeline(ImagePipeline):
    """Z-Image's transformer, likewise."""

    family = families.by_name("z_image")


class WanVideoPipeline(ImagePipeline):
    """Wan's transformer, likewise."""

    family = families.by_name("wan")


class StableDiffusionPipeline(ImagePipeline):
    """Stable Diffusion 1's UNet (`unet`, or `dit`), likewise."""

    family = families.by_name("sd15")


class StableDiffusionXLPipeline(ImagePipeline):
    """SDXL's UNet (`unet`, or `dit`), likewise."""

    family = families.by_name("sdxl")


class StableDiffusion3Pipeline(ImagePipeline):
    """Stable Diffusion 3's transformer, likewise."""

    family = families.by_name("sd3")


def _found(files: list[Path], known: tuple[ModuleType, ...]) -> ModelSpec:
    """What `files` hold; a model of another family than the pipeline's is called by its name."""
    try:
        return identify_files(files, known)
    except Trouble as trouble:
        if trouble.kind != "not_recognised" or len(known) != 1:
            raise
        try:
            other = identify_files(files, families.FAMILIES)
        except Trouble:
            raise trouble from None
        kind = _pipeline_of(other.family).__name__
        sentence = f"{files[0].name} is of {other.title}; this pipeline is for {known[0].TITLE}."
        raise Trouble("wrong_family", sentence, hint=f"Take {kind}, or another file.") from None


def _pipeline_of(family: str) -> type[ImagePipeline]:
    return next(kind for kind in ImagePipeline.__subclasses__() if family == kind.family.NAME)


def _expanded(paths: list[Path]) -> list[Path]:
    """Folders replaced by the weight files in them, except where an index says which those are."""
    return [file for path in paths for file in _inside(path)]


def _inside(path: Path) -> list[Path]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    return [path] if not files or any(path.glob("*.index.json")) else files


def _folder(paths: list[Path]) -> Path:
    return paths[0] if paths[0].is_dir() else paths[0].parent


class _Progress:
    """Calls `bar` (as tqdm is called) and `on_step` after every step."""

    def __init__(self, bar, steps: int, on_step):
        self.on_step, self.bar = on_step, None if bar is None else iter(bar(range(steps)))

    def __enter__(self):
        if self.bar is not None:
            next(self.bar, None)
        return self.step if self.bar is not None or self.on_step else None

    def step(self, step: Step) -> None:
        if self.bar is not None:
            next(self.bar, None)
        if self.on_step:
            self.on_step(step)

    def __exit__(self, *_):
        return False
