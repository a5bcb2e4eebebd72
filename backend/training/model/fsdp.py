"""Weights, gradients and optimizer state spread over processes, as the launcher's configuration asks: FSDP2, or a stage
of DeepSpeed's ZeRO.

Both are carried out by torch's own `fully_shard`, which always spreads all three: ZeRO-3 gathers a block each time that
it computes, ZeRO-1 and ZeRO-2 keep a gathered block until the backward pass is over unless most weights are frozen, and
ZeRO-1 sums whole gradients over the turns of a step. `benchmarks/zero.py` counts what that holds beside DeepSpeed's own
engine. Frozen weights are spread in their own format, adapters and other weights that train in float32; the latter are
gathered in what is computed with, and all other casting is the learner's own. What is saved is whole, so files are of
the same form as those of one process, and a state is gone on with by any number of processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from accelerate import Accelerator
from torch import nn

from backend.schema.messages import Trouble
from backend.schema.training.config import TrainingConfig
from backend.schema.untrusted import read_object

if TYPE_CHECKING:
    from backend.training.model.training_module import TrainingModule

T = TypeVar("T")
OURS = "LOFT_SPREAD"  # the environment of this process says it to all modules: "", or JSON with how weights are spread


def asked() -> bool:
    """Whether weights are spread over the processes."""
    return bool(os.environ.get(OURS))


def read_launcher_environment(config: TrainingConfig) -> tuple:
    """Reads from the launcher's environment what is asked for, before accelerate does: the settings with what one
    process does of it by itself, and a sentence about it, or "". Raises Trouble."""
    os.environ[OURS] = ""
    if _on("ACCELERATE_USE_DEEPSPEED"):
        stage, places = _zero()
        in_ram = sorted(what for what, device in places.items() if device in ("cpu", "nvme"))
        wanted = (
            {"again": stage == 3, "in_ram": bool(in_ram), "summed_whole": stage == 1, "no_more": True} if stage else {}
        )
        said = _zero_by_fsdp2(stage, places)
    elif _on("ACCELERATE_USE_FSDP"):
        if os.environ.get("FSDP_VERSION", "2") != "2":
            raise Trouble(
                "bad_value", "The launcher's configuration asks for FSDP 1.", hint="Set fsdp_version: 2 in it."
            )
        in_ram = ["optimizer", "param"] if _on("FSDP_OFFLOAD_PARAMS") else []
        wanted = {"again": _on("FSDP_RESHARD_AFTER_FORWARD"), "in_ram": bool(in_ram), "summed_whole": False}
        said = "Weights are spread over the processes by FSDP2."
    else:
        return config, ""
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        os.environ.pop(name, None)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return _alone(config, in_ram)
    os.environ[OURS] = json.dumps(wanted) if wanted else ""
    return config, said


def _alone(config: TrainingConfig, in_ram: list[str]) -> tuple:
    """`read_launcher_environment` of one process, which has nobody to share with: an optimizer that is to wait in RAM
    does, by the trainer's own means."""
    words = ["There is one process, so nothing is spread."]
    if "optimizer" in in_ram:
        memory = dataclasses.replace(config.memory, enable_optimizer_cpu_offload=True)
        config = dataclasses.replace(config, memory=memory)
        words.append("The optimizer works in RAM, as the configuration asks (--enable_optimizer_cpu_offload).")
    if "param" in in_ram:
        words.append("The weights stay on the device; frozen ones wait in RAM with --enable_model_cpu_offload.")
    return config, " ".join(words)


SPREADS = {
    1: (
        "the optimizer's state; gradients and weights are spread as well, so a process holds less than asked between "
        "steps"
    ),
    2: (
        "the optimizer's state and gradients; weights are spread as well, so a process holds less than asked between "
        "steps"
    ),
    3: "the optimizer's state, gradients and weights, and so it is done",
}


def _zero_by_fsdp2(stage: int, places: dict[str, str]) -> str:
    """What is done for a stage of ZeRO and why, and what else of DeepSpeed's configuration is not taken."""
    if stage == 0:
        words = [
            (
                "ZeRO stage 0 spreads nothing: each process holds all weights, and torch's DDP, not DeepSpeed's "
                "engine, "
                "averages gradients."
            )
        ]
    else:
        words = [
            (
                f"ZeRO stage {stage} is carried out by torch's FSDP2, not by DeepSpeed's engine. It asks to spread "
                f"{SPREADS[stage]}."
            )
        ]
        if stage < 3:
            words.append(
                "A gathered block stays until the backward pass is over, except where most of the weights are frozen."
            )
        words.append(
            "The reason: of two and of four processes each held less than with that engine, between steps and within "
            "them, but for "
            "a LoRA under ZeRO-3 within a step (two thirds of a block more: a gathered block is there twice for a "
            "moment). Losses are "
            "those of one process but for rounding (1e-6 in float32, 1e-4 in bf16), adapters train in float32 beside "
            "frozen weights in "
            "bf16, states are gone on with by any number of processes, and no further package is needed."
        )
    if stage and places["optimizer"] in ("cpu", "nvme") and places["param"] not in ("cpu", "nvme"):
        words.append("With the optimizer, the pieces of the weights wait in RAM too.")
    if stage and "nvme" in places.values():
        words.append("What is to be offloaded to NVMe waits in RAM.")
    file = _config_file()
    said = _read(file) if file else {}
    flags = {
        "gradient_clipping": "--max_grad_norm", "optimizer": "--customized_optimizer", "scheduler": "--lr_scheduler",
        "gradient_accumulation_steps": "--gradient_accumulation_steps", "train_micro_batch_size_per_gpu": "--batch_size",
        "fp16": "--mixed_precision", "bf16": "--mixed_precision",
    }  # fmt: skip
    clipping = os.environ.get("ACCELERATE_GRADIENT_CLIPPING", "none")
    ours = {
        name: value for name, value in said.items() if name in flags and value not in ("auto", 1, {"enabled": "auto"})
    }
    ours |= {"gradient_clipping": clipping} if clipping not in ("none", "auto", "") else {}
    if ours:
        told = ", ".join(f"{name} ({flags[name]})" for name in sorted(ours))
        words.append(f"Said by the trainer's own flags and not taken from there: {told}.")
    return " ".join(words)


def _config_file() -> str:
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
    return "" if file == "none" else file


def _read(file: str) -> dict:
    try:
        return read_object(Path(file))
    except Trouble as trouble:
        raise Trouble("bad_file", f"DeepSpeed's configuration {file} cannot be read: {trouble.message}") from None


def _zero() -> tuple[int, dict[str, str]]:
    """DeepSpeed's stage, and the places of "param" and "optimizer" ("none", "cpu", "nvme"): from its JSON file, if the
    configuration names one, or from the configuration. Raises Trouble."""
    file = _config_file()
    if file:
        said = _read(file).get("zero_optimization", {"stage": 0})  # without it, DeepSpeed spreads nothing
        try:
            stage = said.get("stage", 0)
            places = {
                what: (said.get(f"offload_{what}") or {}).get("device", "none") for what in ("param", "optimizer")
            }
        except (TypeError, AttributeError) as error:
            raise Trouble("bad_file", f"DeepSpeed's configuration {file} cannot be read: {error!r}.") from None
    else:
        stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        places = {
            what: os.environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{what.upper()}_DEVICE", "none")
            for what in ("param", "optimizer")
        }
    if str(stage) not in ("0", "1", "2", "3"):
        raise Trouble("bad_value", f"DeepSpeed's configuration asks for ZeRO stage {stage}.", hint="Stages are 0 to 3.")
    if other := sorted({str(device) for device in places.values()} - {"none", "cpu", "nvme"}):
        raise Trouble(
            "bad_value", f"DeepSpeed's configuration offloads to {other[0]}.", hint="Places are none, cpu and nvme."
        )
    return int(stage), places


def check(config: TrainingConfig, *, kept, quantized) -> None:
    """Raises Trouble for what cannot be spread."""
    if not asked():
        return
    training, memory = config.training, config.memory
    if kept or quantized:
        name = sorted({*kept, *quantized})[0]
        raise Trouble(
            "bad_value",
            (
                f"The weights of {name} are spread over the processes; they cannot be in FP8, quantized or offloaded "
                "as "
                "well."
            ),
            hint="Leave out --fp8_models, --quant_options and offloading, or launch without that configuration.",
        )
    if memory.enable_optimizer_cpu_offload:
        raise Trouble(
            "bad_value",
            (
                "Where weights are spread, the optimizer's place is said in the launcher's configuration, not by "
                "--enable_optimizer_cpu_offload."
            ),
            hint="Use the configuration's own offload.",
        )
    if training.mixed_precision == "fp16":
        raise Trouble("bad_value", "Mixed precision fp16 does not train where weights are spread.", hint="Use bf16.")
    if training.customized_optimizer.strip().lower() == "muon":
        raise Trouble(
            "bad_value", "Muon needs whole matrices, and they are spread over the processes.", hint="Use adamw."
        )


def spread(learner: TrainingModule, accelerator: Accelerator) -> None:
    """Spreads the weights of every part over all processes: what computes gathers a block at a time, and then the rest
    of the part.

    With "in_ram" the pieces wait in RAM, and so do gradients and optimizer.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    wanted, device = json.loads(os.environ[OURS]), accelerator.device.type
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device, (accelerator.num_processes,)),
        "offload_policy": CPUOffloadPolicy() if wanted["in_ram"] and device != "cpu" else OffloadPolicy(),
    }
    for part in learner.parts.values():
        # Wide weights are gathered in what is computed with; cast by autocast, each would have a copy until the
        # backward pass is over.
        wide = _is_wider(part, learner.dtype)
        # Whole frozen weights beside their pieces would be more than whole ones alone, which is what DeepSpeed's first
        # two stages hold.
        options["reshard_after_forward"] = wanted["again"] or (wanted.get("no_more", False) and _is_mostly_frozen(part))
        options["mp_policy"] = (
            MixedPrecisionPolicy(param_dtype=learner.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
            if wide
            else MixedPrecisionPolicy()
        )
        classes = set(getattr(part, "_no_split_modules", None) or ())
        for block in [module for module in part.modules() if type(module).__name__ in classes]:
            fully_shard(block, **options)
        fully_shard(part, **options)
    if wanted[
        "summed_whole"
    ]:  # accelerate asks for it where gradients are summed over several turns; else each turn's are spread at once
        learner.__dict__["no_sync"] = lambda: _without_sync(learner)  # a method of this one module


def _is_mostly_frozen(part: nn.Module) -> bool:
    weights = list(part.parameters())
    return 2 * sum(weight.numel() for weight in weights if weight.requires_grad) < sum(one.numel() for one in weights)


def _is_wider(part: nn.Module, dtype: torch.dtype) -> bool:
    """Whether most of a part's weights are wider than `dtype`: those that train in float32 and compute in bf16."""
    count = sum(weight.numel() for weight in part.parameters())
    return sum(weight.numel() for weight in part.parameters() if weight.itemsize > dtype.itemsize) > count / 2


def _on(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes")


@contextlib.contextmanager
def _without_sync(learner: TrainingModule) -> Iterator[None]:
    from torch.distributed.fsdp import FSDPModule

    for part in learner.parts.values():
        cast(FSDPModule, part).set_requires_gradient_sync(False)
    try:
        yield
    finally:
        for part in learner.parts.values():
            cast(FSDPModule, part).set_requires_gradient_sync(True)


def whole(value: T) -> T:
    """`value` (a tensor, or lists and dicts of them) with every spread tensor put together, in RAM. All processes must
    call it."""
    given: Any = value
    if isinstance(given, dict):
        return cast(T, {key: whole(one) for key, one in given.items()})
    if isinstance(given, list | tuple):
        return cast(T, type(given)(whole(one) for one in given))
    return given.full_tensor().cpu() if _is_spread(given) else given


@torch.no_grad()
def fill(weight: torch.Tensor, values: torch.Tensor) -> None:
    """Gives `weight` the numbers of the whole tensor `values`."""
    weight.copy_(shard_like(values, weight))


def shard_like(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This process's piece of `values` where `like` is spread; `values` itself where it is not."""
    if not _is_spread(like):
        return values
    from torch.distributed.tensor import distribute_tensor

    spread: Any = like  # a DTensor
    return distribute_tensor(values.to(like.device), spread.device_mesh, spread.placements, src_data_rank=None)


def shard_optimizer_state(saved: dict, optimizer: torch.optim.Optimizer) -> dict:
    """A whole state of an optimizer as that `optimizer` keeps it: tensors of a weight's shape are spread as the weight
    is."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state = {
        index: {
            name: shard_like(value, weights[index])
            if torch.is_tensor(value) and value.shape == weights[index].shape
            else value
            for name, value in values.items()
        }
        for index, values in saved["state"].items()
    }
    return {**saved, "state": state}


def number(value) -> float:
    """A scalar that may be spread."""
    return float(value.full_tensor() if _is_spread(value) else value)


def _is_spread(value) -> bool:
    return torch.is_tensor(value) and hasattr(value, "full_tensor")
