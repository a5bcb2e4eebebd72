"""Placed weights under autograd: gradients of adapters equal those of a resident module, bit for bit, and nothing is kept."""

from __future__ import annotations

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from backend.engine.loading import load
from backend.engine.offload import placement
from backend.engine.offload.autograd import OffloadedPass
from backend.schema.memory_plan import VramConfig
from tests.engine.small import WIDTH, inputs

pytestmark = pytest.mark.torch

DISK = {"offload_device": "disk", "onload_device": "disk", "preparing_device": "disk"}
FP8 = {"offload_dtype": "float8_e4m3fn", "onload_dtype": "float8_e4m3fn", "preparing_dtype": "float8_e4m3fn"}
MIXED = {"offload_device": "disk", "onload_device": "disk", "preparing_dtype": "float8_e5m2"}


class Adapted(nn.Module):
    """A linear layer with a low-rank branch that learns."""

    def __init__(self, base: nn.Linear, seed: int):
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(seed)
        rows, columns = base.weight.shape
        self.down = nn.Parameter(torch.randn(4, columns, generator=generator).to(base.weight.dtype) * 0.1)
        self.up = nn.Parameter(torch.randn(rows, 4, generator=generator).to(base.weight.dtype) * 0.1)

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def adapt(module: nn.Module) -> list[nn.Parameter]:
    added = []
    for index, block in enumerate(module.blocks):
        for offset, name in enumerate(("to_q", "down")):
            layer = Adapted(getattr(block, name), seed=10 * index + offset)
            setattr(block, name, layer)
            added += [layer.down, layer.up]
    return added


def gradients(module: nn.Module, mode: str, steps: int = 2) -> list[torch.Tensor]:
    """Of the adapters, after some steps of plain descent."""
    added, given, calls = adapt(module), inputs(2), []
    module.checkpoints = {"plain": None, "checkpoint": False, "reentrant": True}[mode]
    module.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    given["x"].requires_grad_(mode == "reentrant")
    for _ in range(steps):
        for parameter in added:
            parameter.grad = None
        module(**given).float().square().mean().backward()
        with torch.no_grad():
            for parameter in added:
                parameter -= 0.1 * parameter.grad
    assert len(calls) == (1 if mode == "plain" else 2) * steps
    return [parameter.grad.clone() for parameter in added]


def resident(part, build, placed=None) -> nn.Module:
    """The module with the file's numbers or, with `placed`, with exactly those that the placement computes with."""
    module = build()
    for name, at in part.tensors.items():
        load.assign(module, name, placed.read(name) if placed else load.read_tensor(at))
    return module.requires_grad_(False)


@pytest.mark.parametrize("mode", ["plain", "checkpoint", "reentrant"])
@pytest.mark.parametrize(("config", "limit"), [(DISK, None), (FP8, None), (MIXED, None), (MIXED, 120_000), (MIXED, 0)])
def test_gradients_equal_those_of_a_resident_module(small, config, limit, mode):
    part, build = small()
    module = build()
    placed = placement.place(module, part, VramConfig(**config), vram_limit_bytes=limit, device="cpu")
    placed.onload()
    with torch.no_grad():  # what may stay is brought in the first pass
        module(**inputs())
    wanted = gradients(resident(part, build, placed), mode)
    for got, want in zip(gradients(module, mode), wanted, strict=True):
        assert want.abs().sum() > 0
        assert torch.equal(got, want)
    assert not placed.calls and not placed.passes
    for pool in (placed.transfer.fetched, placed.transfer.cast):
        assert len(pool.slots) <= pool.count and not any(slot.num_users for slot in pool.slots)
    placed.close()


def saved_shapes(module: nn.Module) -> set[tuple[int, ...]]:
    """Shapes of everything that autograd saves in one forward pass and that is not found again otherwise."""
    seen = set()

    def pack(tensor):
        seen.add(tuple(sorted(tensor.shape)))
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(**inputs()).float().mean()
    return seen


@pytest.mark.parametrize("config", [DISK, FP8])
def test_the_graph_keeps_no_weights(small, config):
    part, build = small(num_blocks=2)
    module, plain = build(), resident(part, build)
    placed = placement.place(module, part, VramConfig(**config), device="cpu")
    placed.onload()
    adapt(module)
    adapt(plain)
    matrices = {(WIDTH, WIDTH), (WIDTH, 4 * WIDTH)}
    assert matrices <= saved_shapes(plain)
    assert not matrices & saved_shapes(module)
    placed.close()


def test_a_broken_backward_leaves_nothing_held(small):
    part, build = small()
    module = build()
    placed = placement.place(module, part, VramConfig(**DISK), device="cpu")
    placed.onload()
    adapt(module)

    def fail(gradient):
        raise MemoryError("no more")

    hook = module.blocks[1].up.register_forward_hook(lambda layer, args, output: output.register_hook(fail) and None)
    with pytest.raises(MemoryError):
        module(**inputs()).float().mean().backward()
    assert placed.passes
    hook.remove()
    with torch.no_grad():
        module(**inputs())
    assert not placed.passes and not any(slot.num_users for slot in placed.transfer.fetched.slots)
    placed.close()


def test_a_change_in_place_of_what_the_backward_needs_is_an_error(small):
    part, build = small()
    module = build()
    placed = placement.place(module, part, VramConfig(**DISK), device="cpu")
    adapt(module)
    seen = {}
    module.blocks[0].to_q.register_forward_pre_hook(lambda layer, args: seen.update(x=args[0]))
    out = module(**inputs())
    seen["x"].detach().add_(1)
    with pytest.raises(RuntimeError, match="in place"):
        out.float().sum().backward()
    placed.close()


@pytest.mark.parametrize("mode", ["plain", "checkpoint"])
def test_what_a_block_began_from_goes_as_soon_as_its_backward_is_over(small, mode):
    """Each later block's input before the first block's backward begins, without a collection: a step would else grow with the depth."""
    part, build = small()
    module = build()
    placed = placement.place(module, part, VramConfig(**DISK), device="cpu")
    placed.onload()
    adapt(module)
    module.checkpoints = {"plain": None, "checkpoint": False}[mode]
    began, alive = [], []
    for block in module.blocks:
        block.register_forward_pre_hook(
            lambda layer, args, kwargs: began.append(weakref.ref((*args, *kwargs.values())[0].untyped_storage())),
            with_kwargs=True,
        )
    module.blocks[0].up.register_forward_hook(
        lambda layer, args, output: (
            output.register_hook(lambda _: alive.append([ref() is not None for ref in began[: len(module.blocks)]]))
            and None
        )
    )
    gc.disable()
    try:
        module(**inputs(2)).float().square().mean().backward()
    finally:
        gc.enable()
    assert len(alive[-1]) == len(module.blocks) and not any(alive[-1][2:]), alive
    assert not any(ref() is not None for ref in began[1:])
    placed.close()


def test_what_leads_only_to_an_output_that_nobody_uses_has_no_gradient():
    told = []
    way_back = OffloadedPass(lambda _: told.append("held"), lambda _: told.append("gone"), list)
    text, picture = nn.Linear(4, 4), nn.Linear(4, 4)
    one, other = (torch.ones(2, 4, requires_grad=True) for _ in range(2))
    (a, b), _ = way_back.enter((one, other), {})
    results = (text(a), picture(b))
    way_back.leave()
    way_back.outputs(results)[1].sum().backward()
    assert told == ["held", "gone"]
    assert picture.weight.grad is not None and text.weight.grad is None
    assert other.grad is not None and one.grad is None
