"""Weights, gradients and optimizer state spread over processes, as the launcher's configuration asks: FSDP2, or a stage of DeepSpeed's ZeRO.

Both are carried out by torch's own `fully_shard`: ZeRO-3 is what gathers a block each time that it computes, ZeRO-1 and ZeRO-2 what keeps a
gathered block until the backward pass is over. Frozen weights are spread in their own format, adapters and other weights that train in
float32; casting is the learner's own. What is saved is whole, so files are of the same form as those of one process, and a state is gone on
with by any number of processes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from backend.schema.messages import Trouble

OURS = "LOFT_SPREAD"  # the environment of this process says it to all modules: "", or JSON with how weights are spread


def asked() -> bool:
    """Whether weights are spread over the processes."""
    return bool(os.environ.get(OURS))


def take_over() -> str:
    """Reads from the launcher's environment what is asked for, before accelerate does; a sentence about it, or "". Raises Trouble."""
    os.environ[OURS] = ""
    if _on("ACCELERATE_USE_DEEPSPEED"):
        stage, in_ram = _zero()
        wanted, said = {"again": stage == 3, "in_ram": in_ram}, _instead_of_deepspeed(stage)
        wanted = wanted if stage else {}
    elif _on("ACCELERATE_USE_FSDP"):
        if os.environ.get("FSDP_VERSION", "2") != "2":
            raise Trouble(
                "bad_value", "The launcher's configuration asks for FSDP 1.", hint="Set fsdp_version: 2 in it."
            )
        wanted = {"again": _on("FSDP_RESHARD_AFTER_FORWARD"), "in_ram": _on("FSDP_OFFLOAD_PARAMS")}
        said = "Weights are spread over the processes by FSDP2."
    else:
        return ""
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        os.environ.pop(name, None)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return "There is one process, so nothing is spread." if wanted else ""
    os.environ[OURS] = json.dumps(wanted) if wanted else ""
    return said if wanted else ""


def _instead_of_deepspeed(stage: int) -> str:
    """What is done for a stage of ZeRO and why, and what else of DeepSpeed's configuration is not taken."""
    kept = (
        "as stage 3 does"
        if stage == 3
        else f"where stage {stage} keeps all weights in each; a gathered block stays until the backward pass is over"
    )
    words = [
        f"ZeRO stage {stage} is carried out by torch's FSDP2, not by DeepSpeed's engine: each process keeps its share of weights, gradients and "
        f"optimizer, {kept}. Frozen weights stay in bf16 beside adapters in float32, and states are gone on with by any number of processes."
    ]
    file = _config_file()
    said = _read(file) if file else {}
    places = [
        said.get("zero_optimization", {}).get(f"offload_{what}", {}).get("device") for what in ("param", "optimizer")
    ]
    places += [os.environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{what}_DEVICE") for what in ("PARAM", "OPTIMIZER")]
    if "nvme" in places:
        words.append("What is to be offloaded to NVMe waits in RAM.")
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
        said = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # `_zero` says so
    return said if isinstance(said, dict) else {}


def _zero() -> tuple[int, bool]:
    """DeepSpeed's stage, and whether anything is offloaded: from its JSON file, if the configuration names one, or from the configuration."""
    file = _config_file()
    if file:
        try:
            said = json.loads(Path(file).read_text(encoding="utf-8"))["zero_optimization"]
            devices = [said.get(f"offload_{what}", {}).get("device", "none") for what in ("param", "optimizer")]
            return int(said["stage"]), any(device in ("cpu", "nvme") for device in devices)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Trouble("bad_file", f"DeepSpeed's configuration {file} cannot be read: {error!r}.") from None
    devices = [os.environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{what}_DEVICE", "none") for what in ("PARAM", "OPTIMIZER")]
    return int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")), any(
        device in ("cpu", "nvme") for device in devices
    )


def check(config, *, kept, quantised) -> None:
    """Raises Trouble for what cannot be spread."""
    if not asked():
        return
    training, memory = config.training, config.memory
    if kept or quantised:
        name = sorted({*kept, *quantised})[0]
        raise Trouble(
            "bad_value",
            f"The weights of {name} are spread over the processes; they cannot be in FP8, quantised or offloaded as well.",
            hint="Leave out --fp8_models, --quant_options and offloading, or launch without that configuration.",
        )
    if memory.enable_optimizer_cpu_offload:
        raise Trouble(
            "bad_value",
            "Where weights are spread, the optimizer's place is said in the launcher's configuration, not by --enable_optimizer_cpu_offload.",
            hint="Use the configuration's own offload.",
        )
    if training.mixed_precision == "fp16":
        raise Trouble("bad_value", "Mixed precision fp16 does not train where weights are spread.", hint="Use bf16.")
    if training.customized_optimizer.strip().lower() == "muon":
        raise Trouble(
            "bad_value", "Muon needs whole matrices, and they are spread over the processes.", hint="Use adamw."
        )


def spread(learner: nn.Module, accelerator) -> None:
    """Spreads the weights of every part over all processes: what computes gathers a block at a time, and then the rest of the part.

    With "in_ram" the pieces wait in RAM, and so do gradients and optimizer.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    wanted, device = json.loads(os.environ[OURS]), accelerator.device.type
    options = {
        "mesh": init_device_mesh(device, (accelerator.num_processes,)),
        "reshard_after_forward": wanted["again"],
        "offload_policy": CPUOffloadPolicy() if wanted["in_ram"] and device != "cpu" else OffloadPolicy(),
    }
    for part in learner.parts.values():
        classes = set(getattr(part, "_no_split_modules", None) or ())
        for block in [module for module in part.modules() if type(module).__name__ in classes]:
            fully_shard(block, **options)
        fully_shard(part, **options)
    learner.no_sync = lambda: _without_sync(
        learner
    )  # asked for by accelerate where gradients are summed over several turns


def _on(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes")


@contextlib.contextmanager
def _without_sync(learner: nn.Module) -> Iterator[None]:
    for part in learner.parts.values():
        part.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        for part in learner.parts.values():
            part.set_requires_gradient_sync(True)


def whole(value):
    """`value` (a tensor, or lists and dicts of them) with every spread tensor put together, in RAM. All processes must call it."""
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(whole(one) for one in value)
    return value.full_tensor().cpu() if _is_spread(value) else value


@torch.no_grad()
def fill(weight: torch.Tensor, values: torch.Tensor) -> None:
    """Gives `weight` the numbers of the whole tensor `values`."""
    weight.copy_(spread_like(values, weight))


def spread_like(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This process's piece of `values` where `like` is spread; `values` itself where it is not."""
    if not _is_spread(like):
        return values
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(values.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def spread_state(saved: dict, optimizer: torch.optim.Optimizer) -> dict:
    """A whole state of an optimizer as that `optimizer` keeps it: tensors of a weight's shape are spread as the weight is."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state = {
        index: {
            name: spread_like(value, weights[index])
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
