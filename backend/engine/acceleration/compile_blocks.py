"""torch.compile per repeated block: one graph, compiled at the first step, serves all blocks, prompts and sizes.

Only the block's own `forward` goes through the compiler. Its hooks stay outside, so a streamed block is fetched (and an
FP8 one cast, whole: `Placement.set_casting`) before its graph runs; parameters are inputs of the graph, so whose
weights they are does not matter. A hot LoRA is part of the block's code: one that is added for the first time is
compiled once, whatever its strength; taken off, the earlier graph is used again. Nothing of torch's compiler is
imported before the first compiled call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from backend.engine.devices.capabilities import why_no_compiler
from backend.schema.messages import Trouble

INDUCTOR = "inductor"  # torch's own, which writes C++ or Triton
BACKEND = INDUCTOR
GRAPHS = 64  # kept at most for a class of blocks: guidance on and off, each set of adapted layers, single and batched


def check(device: torch.device) -> None:
    """Raises Trouble where nothing can be compiled for `device`: asked before anything is loaded."""
    reason = why_no_compiler(device) if BACKEND == INDUCTOR else None
    if reason:
        raise Trouble(
            "no_compiler", f"The model cannot be compiled: {reason}.", hint="Install it, or leave compile off."
        )


def compile_blocks(module: nn.Module, lists: Iterable[str]) -> None:
    """Compiles the blocks in the module lists `lists` of `module`, at their first call."""
    for block in _blocks(module, lists):
        _check_free(block)
        block.__dict__["forward"] = _ready_for_compiler(
            torch.compile(type(block).forward.__get__(block), dynamic=True, backend=BACKEND)
        )


def undo(module: nn.Module, lists: Iterable[str]) -> None:
    """The blocks compute as they were written again. What was compiled is kept for the next time."""
    for block in _blocks(module, lists):
        block.__dict__.pop("forward", None)


def is_compiled(module: nn.Module, lists: Iterable[str]) -> bool:
    """Whether `compile_blocks` is in effect."""
    return any(getattr(block.__dict__.get("forward"), "compiled", False) for block in _blocks(module, lists))


def check_whole(module: nn.Module, lists: Iterable[str], moved: Iterable[nn.Module]) -> None:
    """Raises Trouble("not_supported") where blocks are offloaded in pieces: a graph cannot wait for weights midway."""
    blocks = {id(block) for block in _blocks(module, lists)}
    if any(id(one) not in blocks for one in moved):
        raise Trouble("not_supported", "Blocks that are moved in pieces cannot be compiled.", hint="Leave compile off.")


def _blocks(module: nn.Module, lists: Iterable[str]) -> Iterator[nn.Module]:
    for name in lists:
        yield from module.get_submodule(name).children()


def _check_free(block: nn.Module) -> None:
    if "forward" in block.__dict__:
        raise Trouble(
            "not_supported", f"The forward of {type(block).__name__} is replaced already, so it is not compiled."
        )


def _ready_for_compiler(compiled: Callable) -> Callable:
    def forward(*args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException

        with _settings():
            try:
                return compiled(*_without_views(args), **_without_views(kwargs))
            except TorchDynamoException as error:
                raise Trouble(
                    "cannot_compile", "The network could not be compiled.", hint="Leave compile off.", detail=str(error)
                ) from error

    forward.compiled = True
    return forward


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    import torch._dynamo.config as dynamo
    import torch.fx.experimental._config as shapes

    # Sizes that happen to be equal (8 tokens, rank 8) are not taken for the same: they would not be, the next time.
    with (
        shapes.patch(use_duck_shape=False),  # pyright: ignore[reportAttributeAccessIssue]  (not in the stubs)
        dynamo.patch(recompile_limit=GRAPHS, force_nn_module_property_static_shapes=False),
    ):
        yield


def _without_views(value: Any) -> Any:
    """`value` with views copied: the compiler guards on a tensor being a view, and would compile the first block
    twice."""
    if isinstance(value, torch.Tensor):
        return value.clone() if value._is_view() else value
    if isinstance(value, dict):
        return {name: _without_views(one) for name, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_without_views(one) for one in value)
    return value
