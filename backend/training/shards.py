"""Weights and optimizer state spread over processes, by FSDP2 or DeepSpeed, as the launcher's configuration asks.

Frozen weights are spread in their own format, adapters and other weights that train in float32; casting is the learner's own. What is saved is
whole, so files are of the same form as those of one process, and a state is gone on with by any number of processes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import nn

from backend.schema.messages import Trouble

OURS = "LOFT_SPREAD"  # the environment of this process says it to all modules


def asked() -> str:
    """"fsdp", "deepspeed", or "" where every process holds all weights."""
    return os.environ.get(OURS, "")


def take_over() -> str:
    """Reads from the launcher's environment what is asked for, before accelerate does. FSDP is then left to `spread`, on any device."""
    on = {kind: _on(f"ACCELERATE_USE_{kind.upper()}") for kind in ("fsdp", "deepspeed")}
    os.environ[OURS] = next((kind for kind, wanted in on.items() if wanted), "")
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    return asked()


def check(config, *, kept, quantised) -> None:
    """Raises Trouble for what cannot be spread."""
    kind = asked()
    if not kind:
        return
    title, training, memory = {"fsdp": "FSDP", "deepspeed": "DeepSpeed"}[kind], config.training, config.memory
    if kept or quantised:
        name = sorted({*kept, *quantised})[0]
        raise Trouble(
            "bad_value", f"{title} spreads the weights of {name} over the processes; they cannot be in FP8, quantised or offloaded as well.",
            hint="Leave out --fp8_models, --quant_options and offloading, or launch without that configuration.",
        )  # fmt: skip
    if memory.enable_optimizer_cpu_offload:
        raise Trouble(
            "bad_value", f"With {title} the optimizer's place is said in the launcher's configuration, not by --enable_optimizer_cpu_offload.",
            hint="Use the configuration's own offload.",
        )  # fmt: skip
    if training.mixed_precision == "fp16":
        raise Trouble("bad_value", f"Mixed precision fp16 does not train with {title} here.", hint="Use bf16.")
    if training.customized_optimizer.strip().lower() == "muon":
        raise Trouble("bad_value", f"Muon needs whole matrices, and {title} spreads them.", hint="Use adamw.")


def spread(learner: nn.Module, accelerator) -> None:
    """Spreads the weights of every part over all processes: what computes gathers a block at a time, and then the rest of the part.

    Reads what the launcher's configuration says of FSDP: version, resharding after the forward pass, waiting in RAM.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    if os.environ.get("FSDP_VERSION", "2") != "2":
        raise Trouble("bad_value", "The launcher's configuration asks for FSDP 1.", hint="Set fsdp_version: 2 in it.")
    options = {
        "mesh": init_device_mesh(accelerator.device.type, (accelerator.num_processes,)),
        "reshard_after_forward": _on("FSDP_RESHARD_AFTER_FORWARD"),
        "offload_policy": CPUOffloadPolicy() if _on("FSDP_OFFLOAD_PARAMS") else OffloadPolicy(),
    }
    for part in learner.parts.values():
        classes = set(getattr(part, "_no_split_modules", None) or ())
        for block in [module for module in part.modules() if type(module).__name__ in classes]:
            fully_shard(block, **options)
        fully_shard(part, **options)
    learner.no_sync = lambda: _without_sync(learner)  # asked for by accelerate where gradients are summed over several turns


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
            name: spread_like(value, weights[index]) if torch.is_tensor(value) and value.shape == weights[index].shape else value
            for name, value in values.items()
        }
        for index, values in saved["state"].items()
    }  # fmt: skip
    return {**saved, "state": state}


def number(value) -> float:
    """A scalar that may be spread."""
    return float(value.full_tensor() if _is_spread(value) else value)


def _is_spread(value) -> bool:
    return torch.is_tensor(value) and hasattr(value, "full_tensor")
