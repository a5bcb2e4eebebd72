"""What a package has to offer for its methods: functions on single layers, and the way their tensors lie in a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Backend:
    """The functions of one method. A layer that it makes is an `nn.Linear` that computes with what it keeps, and moves with `.to(device)`."""

    settings: Mapping[str, object]  # that `backend_config_kwargs` may name, with their defaults
    quantize: Callable[[nn.Linear, Mapping], nn.Linear]  # on the device where the layer lies
    empty: Callable[
        [nn.Linear, torch.dtype, Mapping], nn.Linear
    ]  # on the meta device, for a state to be loaded with `assign=True`
    owns: Callable[[nn.Module], bool]
    computing_dtype: Callable[[nn.Linear], torch.dtype]
    full_weight: Callable[[nn.Linear], torch.Tensor]  # dequantized, in that dtype
    flatten: Callable[[State], tuple[State, dict[str, str]]]  # a module's state as plain tensors and strings
    unflatten: Callable[[State, Mapping[str, str]], State]
    takes: Callable[[torch.Tensor], bool]  # whether a weight that `unflatten` made is of this method
    open_settings: bool = False  # the package itself says which settings there are
