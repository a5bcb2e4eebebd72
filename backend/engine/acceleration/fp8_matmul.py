"""FP8 matmul: linear layers with float8_e4m3fn weights multiply in FP8 (`torch._scaled_mm`), without a cast.

The layer's input is rounded to FP8 as well, each row with a power of two of its own that fills the format (exact to
undo, and no kernel for scaled rows is needed); sums are float32 or what the card's fast accumulation is. Faster than
bfloat16 on cards that have it, and less exact than FP8 *storage*, where only weights are rounded: here every input is
too. There is no gradient: training refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import nn

from backend.catalog.spec import PartSpec
from backend.engine.devices.capabilities import why_no_fp8_products
from backend.engine.lora.side_branch import STATE as ADAPTERS
from backend.engine.lora.side_branch import adapted
from backend.engine.offload.blocks import Unit
from backend.engine.offload.placement import Placement
from backend.engine.offload.transfer import FP8_SCALE
from backend.schema import measured_choices
from backend.schema.memory_plan import VramConfig
from backend.schema.messages import Trouble

CODES = "float8_e4m3fn"
ALIGNED = 16  # rows and columns of a weight: what the kernels take
_LARGEST_MANTISSA = 0.875  # 448 is 0.875 * 2**9


def check(device: torch.device) -> None:
    """Raises Trouble where `device` has no FP8 products: asked before anything is loaded."""
    reason = why_no_fp8_products(device)
    if reason:
        raise Trouble("no_fp8_products", f"FP8 products were asked for, but {reason}.", hint="Leave fp8_products off.")


def stored(config: VramConfig, part: PartSpec) -> VramConfig:
    """`config` with weights in FP8 where it leaves that open. Raises Trouble where it asks for another storage."""
    config = replace(config, preparing_dtype=config.preparing_dtype or CODES)
    if CODES not in (config.offload_dtype, config.onload_dtype, config.preparing_dtype, part.storage):
        raise Trouble(
            "vram_config",
            f"FP8 products need weights stored as {CODES}, "
            f"but {part.name} is to be stored as {config.preparing_dtype}.",
            hint=f"Set preparing_dtype='{CODES}' or leave it out, or leave fp8_products off.",
        )
    return config


def in_codes(config: VramConfig) -> VramConfig:
    """`config` with every state before the computation in FP8, wherever it is in memory."""
    return replace(config, offload_dtype=CODES, onload_dtype=CODES, preparing_dtype=CODES)


def chosen(unit: Unit) -> frozenset[int]:
    """Indices of a block's tensors that are multiplied in FP8: weights of linear layers without a side branch that
    reads the weight itself."""
    return frozenset(index for index, places in enumerate(unit.targets) if all(_suits(*place) for place in places))


def _suits(owner: nn.Module, leaf: str) -> bool:
    if leaf != "weight" or not isinstance(owner, nn.Linear):
        return False
    branches = owner.__dict__.get(ADAPTERS)
    if branches is not None and (branches.added or branches.column_excess is not None):
        return False
    return owner.in_features % ALIGNED == 0 and owner.out_features % ALIGNED == 0


def prepare(placed: Placement) -> None:
    """Gives the linear layers of the blocks a forward that takes FP8 weights as well. Names and parameters stay."""
    by_rows = measured_choices.chosen().fp8_scales == "rows"
    for unit in placed.blocks:
        for owner, _ in {place for index in chosen(unit) for place in unit.targets[index]}:
            kind = type(owner)
            base = getattr(kind, "adapted_class", kind)
            made = native(base, by_rows)
            owner.__class__ = made if base is kind else adapted(made)


@lru_cache(maxsize=64)
def native(kind: type[nn.Linear], by_rows: bool = False) -> type[nn.Linear]:
    """The subclass of `kind` that multiplies with codes where its weight is codes."""
    name = f"Fp8{kind.__name__}"
    return type(
        name, (kind,), {"forward": _forward(kind, by_rows), "__module__": kind.__module__, "__qualname__": name}
    )


def _forward(kind: type[nn.Linear], by_rows: bool) -> Callable:
    base = kind.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.dtype is not torch.float8_e4m3fn:
            return base(self, x)
        if torch.is_grad_enabled() and x.requires_grad:
            raise Trouble(
                "not_supported",
                "FP8 products have no gradient: a rounded input says nothing about how to change it.",
                hint="Train without fp8_products; FP8 storage of frozen weights is allowed.",
            )
        given = (x, self.weight, getattr(self, FP8_SCALE))
        y = product(*given, by_rows=True) if by_rows else product(*given)
        return y if self.bias is None else y + self.bias

    return forward


def product(x: torch.Tensor, codes: torch.Tensor, factor: torch.Tensor, *, by_rows: bool = False) -> torch.Tensor:
    """x (..., i) times (codes (o, i) * factor)^T: (..., o) in the dtype of x. `factor` float32, (1,) or (o,).
    `by_rows`: the kernel applies the scales, else passes of their own do."""
    rows = x.reshape(-1, x.shape[-1])
    up, down = scales(rows)
    # the kernels take rows that lie one after the other
    rounded = (rows * up.to(rows.dtype)).to(torch.float8_e4m3fn).contiguous()
    if by_rows:
        return _by_rows(rounded, down, codes, factor).to(x.dtype).view(*x.shape[:-1], codes.shape[0])
    one = torch.ones(1, dtype=torch.float32, device=x.device)
    single = factor.numel() == 1
    exact = x.device.type == "cpu" and x.dtype is torch.float32
    y = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]  (the only FP8 matmul that torch has)
        rounded,
        codes.t(),
        scale_a=one,
        scale_b=factor if single else one,
        out_dtype=torch.float32 if exact else torch.bfloat16,
        use_fast_accum=x.device.type == "cuda",
    )
    y = y * down.to(y.dtype) if single else y * (down * factor)
    return y.to(x.dtype).view(*x.shape[:-1], codes.shape[0])


def _by_rows(rounded: torch.Tensor, down: torch.Tensor, codes: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The product (M, N), bfloat16, with all scales applied by its kernel: (M, 1) of the input, (1, N) of the
    weight."""
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]  (the only FP8 matmul that torch has)
        rounded,
        codes.t(),
        scale_a=down,
        scale_b=factor.reshape(1, -1).expand(1, codes.shape[0]).contiguous(),
        out_dtype=torch.bfloat16,
        use_fast_accum=rounded.device.type == "cuda",
    )


def scales(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Powers of two (M, 1), float32, that bring the largest number of each row (M, K) to just inside the format, and
    their inverses."""
    mantissa, exponent = torch.frexp(rows.abs().amax(dim=1, keepdim=True).to(torch.float32))
    most = 14 if rows.dtype is torch.float16 else 100
    shift = (9 - exponent - (mantissa > _LARGEST_MANTISSA).to(exponent.dtype)).clamp(-most, most)
    return _power(shift), _power(-shift)


def _power(exponent: torch.Tensor) -> torch.Tensor:
    return ((exponent + 127) << 23).to(torch.int32).view(torch.float32)  # the bits themselves: exact on every device
