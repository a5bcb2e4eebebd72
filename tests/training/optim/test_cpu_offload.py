"""An optimizer in RAM: steps of chunks are the step of all, and its state is not where the weights compute."""

import pytest

torch = pytest.importorskip("torch")

from backend.schema.training.config import TrainingConfig
from backend.training.optim.cpu_offload import OptimizerCpuOffload
from backend.training.optim.optimizers import make_optimizers

pytestmark = pytest.mark.torch


def weights() -> dict[str, torch.nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    return {f"dit.{number}.w": torch.nn.Parameter(torch.randn(8, 8, generator=random)) for number in range(5)}


def trained(steps: int, name: str, *, chunk_bytes: int | None) -> list[torch.Tensor]:
    from dataclasses import replace

    own = weights()
    beside = OptimizerCpuOffload(own, chunk_bytes=chunk_bytes) if chunk_bytes else None
    section = replace(TrainingConfig().training, customized_optimizer=name, learning_rate=0.01)
    optimizers = make_optimizers(beside.copies if beside else own, section)
    random = torch.Generator().manual_seed(1)
    for step in range(steps):
        for number, weight in enumerate(own.values()):
            weight.grad = None if number == step else torch.randn(8, 8, generator=random)
        if beside:
            beside.step(optimizers, good=step != 2)
        elif step != 2:
            for optimizer in optimizers:
                optimizer.step()
        assert beside is None or all(weight.grad is None for weight in [*own.values(), *beside.copies.values()])
    return [weight.detach() for weight in own.values()]


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "adafactor"])
def test_steps_in_chunks_are_the_step_of_all(name: str):
    whole = trained(5, name, chunk_bytes=None)
    assert not torch.equal(whole[0], next(iter(weights().values())))
    for chunk_bytes in (1, 600, 2**30):
        assert all(torch.equal(one, other) for one, other in zip(whole, trained(5, name, chunk_bytes=chunk_bytes)))
