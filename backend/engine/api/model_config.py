"""What the Python API is told about files: which they are, where their weights are to lie, and what model they make
together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from backend import families
from backend.catalog.family import Family
from backend.catalog.hub import download
from backend.catalog.models import model_folder
from backend.catalog.models.identify import fitting, identify_files, missing_of
from backend.catalog.spec import ModelSpec, PartSpec
from backend.engine.api import diffsynth_arguments
from backend.engine.pipeline.part_loading import Loading
from backend.engine.quantization.config import MixedQuantizeConfig, QuantizeConfig
from backend.schema.memory_plan import VramConfig
from backend.schema.messages import Trouble
from backend.schema.untrusted import exists, is_folder
from backend.system.text_files import ends_with


@dataclass(frozen=True)
class ModelConfig:
    """Files, and where their weights are to lie.

    Either `path` (a file, a list of shards, or a folder) or `model_id` with `origin_file_pattern` (wildcards; a list of
    them; a trailing slash means the folder): looked for on this machine first, then downloaded. The eight fields of the
    four states are those of `VramConfig`; dtypes may be torch's. `quantize`: which linear layers are quantized, and
    how. `state_dict`: the weights, in place of those in the files, which then only say what model it is.
    `clear_parameters`: the module without any weight.
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
    clear_parameters: bool = False
    state_dict: Mapping[str, torch.Tensor] | None = None
    quantize: QuantizeConfig | MixedQuantizeConfig | None = None

    def __new__(cls, *given, **named):
        """Raises Trouble for a word that is no setting, before Python does in words of its own."""
        own = cls.__dataclass_fields__
        diffsynth_arguments.refuse(
            {name: value for name, value in named.items() if name not in own},
            {},
            own,
            what="ModelConfig",
        )
        if len(given) > len(own):
            raise Trouble(
                "bad_value", f"ModelConfig has {len(own)} settings, not {len(given)}.", hint="Name them, as in path=..."
            )
        return super().__new__(cls)

    def __post_init__(self):
        _check_loading(self)
        _check_texts("path", self.path, Path)
        _check_texts("origin_file_pattern", self.origin_file_pattern)
        for name in ("model_id", "download_source", "local_model_path"):
            _check_text(name, getattr(self, name), *((Path,) if name == "local_model_path" else ()))
        for name in VramConfig.__dataclass_fields__:
            _check_text(name, getattr(self, name), torch.device if name.endswith("device") else torch.dtype)

    def files(self) -> list[Path]:
        """The files (or folders) meant, all of them on this machine afterwards. Raises Trouble."""
        if self.path is not None:
            paths = [self.path] if isinstance(self.path, str | Path) else list(self.path)
            for path in paths:
                if not exists(Path(path)):
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

    def loading(self, parts: Mapping[str, PartSpec]) -> dict[str, Loading]:
        """How each of the `parts` that the files hold is loaded, where more is said of that than where its weights
        lie."""
        quantized = {} if self.quantize is None else _of_parts(self.quantize, parts)
        found = {name: Loading(quantized.get(name), self.state_dict, self.clear_parameters) for name in parts}
        return {name: said for name, said in found.items() if not said.is_plain}

    def vram(self) -> VramConfig:
        return VramConfig(**{name: _word(getattr(self, name)) for name in VramConfig.__dataclass_fields__})

    def folder(self) -> Path:
        """The folder meant, or that of the files."""
        first = self.files()[0]
        return first if is_folder(first) else first.parent


def _check_loading(config: ModelConfig) -> None:
    """Raises Trouble for `clear_parameters`, `state_dict` or `quantize` of another kind."""
    if not isinstance(config.clear_parameters, bool):
        raise Trouble(
            "bad_value", f"ModelConfig(clear_parameters={config.clear_parameters!r:.40}) is neither True nor False."
        )
    if config.state_dict is not None and not isinstance(config.state_dict, Mapping):
        raise Trouble("bad_value", f"ModelConfig(state_dict={config.state_dict!r:.40}) is no table of tensors.")
    if config.quantize is not None and not isinstance(config.quantize, QuantizeConfig | MixedQuantizeConfig):
        raise Trouble(
            "bad_value",
            f"ModelConfig(quantize={config.quantize!r:.60}) is no QuantizeConfig.",
            hint='Write quantize=QuantizeConfig(method="int8").',
        )


def _of_parts(config: QuantizeConfig | MixedQuantizeConfig, parts: Mapping[str, PartSpec]) -> dict:
    """Part -> config. Of files with several parts each gets what names of its layers; a target need only be in one of
    them."""
    if len(parts) < 2:
        return dict.fromkeys(parts, config)
    names = {
        part: [name.removesuffix(".weight") for name, at in spec.tensors.items() if _is_matrix(name, at)]
        for part, spec in parts.items()
    }
    found = {}
    for part, layers in names.items():
        own = [_within(one, layers) for one in config.all()]
        own = [one for one in own if any(map(one.matches, layers))]
        if own and isinstance(config, MixedQuantizeConfig):
            found[part] = replace(config, configs=own)
        elif own:
            found[part] = own[0]
    return found


def _is_matrix(name: str, at) -> bool:
    return name.endswith(".weight") and len(at.shape) == 2


def _within(config: QuantizeConfig, layers: list[str]) -> QuantizeConfig:
    """`config` with those of its targets that are among `layers`."""
    if config.target_modules is None:
        return config
    targets = [one for one in config.target_modules if any(ends_with(name, one) for name in layers)]
    return replace(config, target_modules=targets)


def _check_text(name: str, value: object, *kinds: type) -> None:
    """Raises Trouble for what is no text, nor of `kinds`."""
    if value is not None and not isinstance(value, (str, *kinds)):
        also = {Path: "a path", torch.device: "a torch.device", torch.dtype: "a torch.dtype"}
        words = " or ".join(["a text", *(also[kind] for kind in kinds)])
        raise Trouble(
            "bad_value",
            f"ModelConfig({name}=...) is {value!r:.80}, which is not {words}.",
            hint="See ModelConfig's description.",
        )
    if isinstance(value, str) and not value.strip() and name in ("path", "model_id"):
        raise Trouble(
            "bad_value", f"ModelConfig({name}={value!r}) names nothing.", hint="Leave it out, or name a file."
        )


def _check_texts(name: str, value: object, *kinds: type) -> None:
    """The same for one, or a list or tuple of them that is not empty."""
    if not isinstance(value, list | tuple):
        return _check_text(name, value, *kinds)
    if not value:
        raise Trouble("bad_value", f"ModelConfig({name}=[]) names no file.", hint="Name at least one, or leave it out.")
    for one in value:
        _check_text(name, "" if one is None else one, *kinds)


def check_one(config: object, setting: str) -> None:
    """Raises Trouble for what is no ModelConfig in a place for one."""
    if not isinstance(config, ModelConfig):
        raise Trouble(
            "bad_value",
            f"{setting} holds {config!r:.80}, which is no ModelConfig.",
            hint="Write ModelConfig(path=...).",
        )


def tell_idle_limit(pipeline) -> None:
    """Warns where a limit was given that nothing comes under: no part waits away from the device that computes."""
    placed = [one.states for one in pipeline.placements.values()]
    if pipeline.limit_bytes is not None and all(states.onload.device == pipeline.device for states in placed):
        warnings.warn(
            f"vram_limit={pipeline.limit_bytes / 2**30:g} has no effect: no part's weights wait away from {pipeline.device}. "
            "Give ModelConfig an offload_device and an onload_device, such as 'cpu' or 'disk'.",
            stacklevel=3,
        )


def _word(value) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")


def identify(
    configs: Iterable[ModelConfig], known: tuple[Family, ...], pipeline_of: Callable[[str], str]
) -> tuple[ModelSpec, dict[str, VramConfig], dict[str, Loading]]:
    """The model that `configs` name together, in any order and any selection of parts, how each part is to be placed,
    and how some are loaded.

    `known`: the families it may be of; `pipeline_of`: what the pipeline of another family is called, for the one who
    took the wrong one.
    """
    if isinstance(configs, ModelConfig | str) or not isinstance(configs, Iterable):
        raise Trouble(
            "bad_value",
            f"model_configs is {configs!r:.80}, which is no list of ModelConfig.",
            hint="Write model_configs=[ModelConfig(path=...)].",
        )
    parts, placed, loading, spec = {}, {}, {}, None
    for config in configs:
        check_one(config, "model_configs")
        found = _found(expanded(config.files()), known, pipeline_of)
        for name, part in found.parts.items():
            if name in parts:
                raise Trouble("bad_value", f"Two model configs bring the part {name}.", hint="Leave one of them out.")
            parts[name], placed[name] = part, config.vram()
        loading |= config.loading(found.parts)
        spec = found if spec is None or "dit" in found.parts else spec
    if spec is None:
        raise Trouble("bad_value", "model_configs is empty.", hint="Name at least the transformer's file.")
    family = families.by_name(spec.family)
    parts = fitting(parts, spec.variant, family)
    missing = missing_of(parts, spec.variant, family)
    loading = {name: said for name, said in loading.items() if name in parts}
    return model_folder.completed(replace(spec, parts=parts, missing=missing, path=None), family), placed, loading


def _found(files: list[Path], known: tuple[Family, ...], pipeline_of: Callable[[str], str]) -> ModelSpec:
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
        sentence = f"{files[0].name} is of {other.title}; this pipeline is for {known[0].TITLE}."
        raise Trouble("wrong_family", sentence, hint=f"Take {pipeline_of(other.family)}, or another file.") from None


def expanded(paths: list[Path]) -> list[Path]:
    """Folders replaced by the weight files in them, except where an index says which those are."""
    return [file for path in paths for file in _inside(path)]


def _inside(path: Path) -> list[Path]:
    files = sorted(path.glob("*.safetensors")) if is_folder(path) else []
    return [path] if not files or any(path.glob("*.index.json")) else files
