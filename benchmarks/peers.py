"""Loft, diffusers and DiffSynth-Studio at the same work: the medium model loaded, placed, called, and with LoRAs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from medium import config_of, files_of, part_of

FP8 = {"offload_dtype": "float8_e4m3fn", "onload_dtype": "float8_e4m3fn", "preparing_dtype": "float8_e4m3fn"}
DISK = {"offload_device": "disk", "onload_device": "disk", "preparing_device": "disk"}


@dataclass(frozen=True)
class Peer:
    """How one engine does what the rows ask for. `folder` holds the model, `quick` says that it has half the width."""

    imports: str  # a statement: a pipeline's class
    networks: str  # a statement: the classes of its three networks
    load: Callable  # (folder, quick) -> module, as it loads by default
    placed: Callable  # (folder, quick, "disk" | "fp8") -> module
    step: Callable  # (module, side of the picture in tokens) -> what one denoising step is called with
    hot: Callable  # (folder, quick, LoRA files) -> module with all of them beside its weights
    fuse: Callable  # (folder, quick, LoRA file) -> (module, fuse it from the file, take it off again)
    everything: Callable | None = None  # (folder, quick) -> reads every tensor by its loader; None: it has none


def _inputs(side: int) -> dict:
    """side x side picture tokens and 64 text tokens; 32 are 512 pixels."""
    import torch

    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(1, side * side, 64, generator=generator).to(torch.bfloat16),
        "encoder_hidden_states": torch.randn(1, 64, 3584, generator=generator).to(torch.bfloat16),
        "timestep": torch.tensor([0.5], dtype=torch.bfloat16),
        "img_shapes": [[(1, side, side)]],
    }


def _step(module, side: int = 32) -> Callable[[], object]:
    given = _inputs(side)
    return lambda: module(**given)


def _loft_load(folder: Path, quick: bool):
    from backend.engine.loading import load

    return load.load_part(part_of(folder, quick))


def loft_placed(folder: Path, quick: bool, settings: dict, **options):
    """A module on meta, placed as `settings` say, and ready to be called."""
    import torch

    from backend.engine.loading import load
    from backend.engine.offload import placement
    from backend.schema.memory_plan import VramConfig

    part = part_of(folder, quick)
    module = load.build_meta(part)
    placement.place(module, part, VramConfig(**settings), device=torch.device("cpu"), **options).onload()
    return module


def _adapters(folder: Path, quick: bool):
    from backend import families
    from backend.engine.lora import adapters as lora

    module = _loft_load(folder, quick)
    return module, lora.Adapters(
        {"dit": module}, family=families.by_name("qwen_image"), specs={"dit": part_of(folder, quick)}
    )


def _loft_hot(folder: Path, quick: bool, files: list[Path]):
    module, adapters = _adapters(folder, quick)
    for file in files:
        adapters.add(file, hot=True)
    return module


def _loft_fuse(folder: Path, quick: bool, file: Path):
    module, adapters = _adapters(folder, quick)
    return module, lambda: adapters.add(file, hot=False), adapters.clear


def _loft_everything(folder: Path, quick: bool):
    import torch

    from backend.engine.loading import load
    from backend.engine.loading.disk_reader import Reader, allocate
    from backend.engine.offload.blocks import find_units

    part = part_of(folder, quick)
    units = find_units(load.build_meta(part), part, torch.bfloat16)
    reader, buffer = Reader(), allocate(max(unit.raw.nbytes for unit in units), torch.device("cpu"))
    return lambda: [reader.read(unit.spans, buffer) for unit in units]


def _diffusers_load(folder: Path, quick: bool):
    import torch
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)


def _diffusers_placed(folder: Path, quick: bool, what: str):
    import torch

    module = _diffusers_load(folder, quick)
    if what == "fp8":
        module.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
        return module
    cpu, copy = torch.device("cpu"), str(folder / "copy")
    module.enable_group_offload(cpu, cpu, offload_type="block_level", num_blocks_per_group=1, offload_to_disk_path=copy)
    return module


def _diffusers_hot(folder: Path, quick: bool, files: list[Path]):
    module = _diffusers_load(folder, quick)
    for number, file in enumerate(files):
        module.load_lora_adapter(str(file), adapter_name=f"a{number}", prefix=None)
    module.set_adapters([f"a{number}" for number in range(len(files))])
    return module


def _diffusers_fuse(folder: Path, quick: bool, file: Path):
    module = _diffusers_load(folder, quick)

    def fuse() -> None:
        module.load_lora_adapter(str(file), adapter_name="a", prefix=None)
        module.fuse_lora(adapter_names=["a"])

    return module, fuse, lambda: (module.unfuse_lora(), module.unload_lora())


def _without_torchvisions_kernels() -> None:
    """DiffSynth imports torchvision. Its usual build does not load beside a CPU build of torch; nothing here calls its
    kernels, but while it is imported it asks for two of them by name."""
    import torch

    global _torchvision
    _torchvision = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            _torchvision.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _diffsynth(folder: Path, quick: bool, states: dict | None = None):
    if quick:
        raise NotImplementedError("the width is written into its transformer's class")
    _without_torchvisions_kernels()
    from diffsynth.configs import VRAM_MANAGEMENT_MODULE_MAPS
    from diffsynth.core import load_model
    from diffsynth.models.model_loader import ModelPool
    from diffsynth.models.qwen_image_dit import QwenImageDiT

    name = "diffsynth.models.qwen_image_dit.QwenImageDiT"
    pool = ModelPool()
    where = {
        pool.import_model_class(key): pool.import_model_class(value)
        for key, value in VRAM_MANAGEMENT_MODULE_MAPS[name].items()
    }
    managed = {} if states is None else {"module_map": where, "vram_config": states}
    paths = [str(path) for path in files_of(folder)]
    return load_model(QwenImageDiT, paths, {"num_layers": config_of(quick)["num_layers"]}, use_disk_map=True, **managed)


def _states(dtype, device: str) -> dict:
    import torch

    away = {
        f"{level}_{what}": value
        for level in ("offload", "onload", "preparing")
        for what, value in (("dtype", dtype), ("device", device))
    }
    return {**away, "computation_dtype": torch.bfloat16, "computation_device": "cpu"}


def _diffsynth_placed(folder: Path, quick: bool, what: str):
    import torch

    return _diffsynth(folder, quick, _states("disk", "disk") if what == "disk" else _states(torch.float8_e4m3fn, "cpu"))


def _diffsynth_step(module, side: int = 32) -> Callable[[], object]:
    import torch

    given, pixels = _inputs(side), 16 * side
    known = {"prompt_emb_mask": torch.ones(1, 64, dtype=torch.long), "height": pixels, "width": pixels}
    latents = torch.randn(1, 16, 2 * side, 2 * side).to(torch.bfloat16)
    return lambda: module(latents, given["timestep"], given["encoder_hidden_states"], **known)


def _diffsynth_lora(file: Path) -> dict:
    import torch
    from diffsynth.core import load_state_dict
    from diffsynth.utils.lora import GeneralLoRALoader

    tensors = load_state_dict(str(file), torch_dtype=torch.bfloat16, device="cpu")
    return GeneralLoRALoader(torch_dtype=torch.bfloat16, device="cpu").convert_state_dict(tensors)


def _diffsynth_hot(folder: Path, quick: bool, files: list[Path]):
    import torch

    module = _diffsynth(folder, quick, _states(torch.bfloat16, "cpu"))
    from diffsynth.core.vram.layers import LoRAHotLoadMixin

    for file in files:
        tensors = _diffsynth_lora(file)
        for layer in module.modules():
            if isinstance(layer, LoRAHotLoadMixin) and f"{layer.name}.lora_A.weight" in tensors:
                layer.lora_A_weights.append(tensors[f"{layer.name}.lora_A.weight"])
                layer.lora_B_weights.append(tensors[f"{layer.name}.lora_B.weight"])
    return module


def _diffsynth_fuse(folder: Path, quick: bool, file: Path):
    import torch

    module = _diffsynth(folder, quick)
    from diffsynth.utils.lora import GeneralLoRALoader

    loader = GeneralLoRALoader(torch_dtype=torch.bfloat16, device="cpu")
    return module, lambda: loader.fuse_lora_to_base_model(module, _diffsynth_lora(file)), lambda: None


def _diffsynth_everything(folder: Path, quick: bool):
    _without_torchvisions_kernels()
    from diffsynth.core.vram import DiskMap

    stored = DiskMap([str(path) for path in files_of(folder)], "cpu")
    return lambda: [stored[name] for name in stored]


PEERS = {
    "Loft": Peer(
        imports="from backend.pipelines import QwenImagePipeline",
        networks="from backend.engine.loading.load import find_class\nfrom backend.families import qwen_image\n"
        "[find_class(part.network) for part in qwen_image.PARTS.values()]",
        load=_loft_load,
        placed=lambda folder, quick, what: loft_placed(folder, quick, {"disk": DISK, "fp8": FP8}[what]),
        step=_step,
        hot=_loft_hot,
        fuse=_loft_fuse,
        everything=_loft_everything,
    ),
    "diffsynth": Peer(
        imports=(
            "import peers\npeers._without_torchvisions_kernels()\nfrom diffsynth.pipelines.qwen_image import "
            "QwenImagePipeline"
        ),
        networks="",
        load=_diffsynth,
        placed=_diffsynth_placed,
        step=_diffsynth_step,
        hot=_diffsynth_hot,
        fuse=_diffsynth_fuse,
        everything=_diffsynth_everything,
    ),
    "diffusers": Peer(
        imports="from diffusers import QwenImagePipeline",
        networks="from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel\n"
        "from transformers import Qwen2_5_VLForConditionalGeneration",
        load=_diffusers_load,
        placed=_diffusers_placed,
        step=_step,
        hot=_diffusers_hot,
        fuse=_diffusers_fuse,
    ),
}
