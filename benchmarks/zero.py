"""What each process holds of a run whose weights are spread: `python benchmarks/zero.py [--processes 1 2 4] [--python
PYTHON_WITH_DEEPSPEED]`.

Runs of the trainer itself on gloo, without a card, under the environment that accelerate's launcher makes of a
configuration with ZeRO: all weights of the transformer in float32 and in bf16, and a LoRA beside frozen weights in
bf16. One process spreads nothing and is what the others are compared with. With `--python`, an interpreter that has the
package deepspeed, its own engine does the same steps: the learner, the batches and the optimizer are the trainer's, all
else is `deepspeed.initialize`; buckets and the room for gathered weights have the size of a block, as their defaults
are larger than this whole model. (Its first start compiles an operator, which takes a minute or two.)

Counted are the bytes of all live tensors of a process, a storage once: weights (with float32 masters) and the
optimizer's state between steps, the gradients that are there when the optimizer is about to step, and the largest sum
in a step, looked at twice in every block forward and backward. Activations are negligible by the size of the picture,
64 x 64.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent
MIB = 2**20
STEPS = 3
WAYS = {
    "all weights, float32": ("--trainable_models", "dit", "--mixed_precision", "no"),
    "all weights, bf16": ("--trainable_models", "dit", "--mixed_precision", "bf16"),
    "LoRA, bf16": ("--lora_base_model", "dit", "--lora_rank", "4", "--mixed_precision", "bf16"),
}
COLUMNS = ("weights", "gradients", "optimizer", "between", "peak")


def run_all(processes: list[int], python: str | None, layers: int, ways: list[str], engines: list[str]) -> None:
    """Prints the table, a row a run. Processes are started once for all runs of as many by one engine: that takes
    longer than the runs."""
    sys.path.insert(0, str(PROJECT))
    from tests.tiny_models import make_qwen_image

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_qwen_image(folder / "model", num_layers=layers, num_heads=8)
        make_set(folder / "set")
        print(
            "| what trains | processes | engine | weights | gradients | optimizer | between steps | peak in a step | "
            "loss |"
        )
        print("|---|---|---|---|---|---|---|---|---|", flush=True)
        for count in processes:
            for engine in ("FSDP2", *(["DeepSpeed"] if python and count > 1 else [])):
                if engine not in engines:
                    continue
                stages = (1, 2, 3) if count > 1 else (0,)
                runs = [(way, stage) for way in ways for stage in stages]
                found = measure(folder, runs, count, engine, python if engine == "DeepSpeed" else sys.executable)
                for (way, stage), one in zip(runs, found, strict=True):
                    name = f"{engine}, ZeRO-{stage}" if stage else "one process"
                    cells = " | ".join(f"{one[key] / MIB:.2f}" for key in COLUMNS)
                    print(f"| {way} | {count} | {name} | {cells} | {one['loss']:.6f} |", flush=True)


def measure(folder: Path, runs: list[tuple[str, int]], count: int, engine: str, python: str) -> list[dict[str, float]]:
    """Of each run the largest bytes over its processes, and the loss of its last step."""
    place = Path(tempfile.mkdtemp(dir=folder))
    shared = [
        *("--model", str(folder / "model"), "--dataset_base_path", str(folder / "set"), "--max_pixels", "4096"),
        *("--max_steps", str(STEPS), "--learning_rate", "1e-3", "--gradient_accumulation_steps", str(4 // count)),
    ]  # fmt: skip
    told = [
        {"stage": stage, "flags": [*shared, *WAYS[way], "--output_path", str(place / str(number))]}
        for number, (way, stage) in enumerate(runs)
    ]
    (place / "runs.json").write_text(json.dumps(told))
    environment = {
        **os.environ,
        "PYTHONPATH": str(PROJECT),
        "LOFT_DATA": str(folder),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "DS_ACCELERATOR": "cpu",
        "FORK_LAUNCHED": "1",  # accelerate then leaves the processes joined when a run ends
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)] if count > 1 else []
    argv = [python, *launcher, str(HERE / "zero.py"), "--worker", engine, str(place)]
    ended = subprocess.run(argv, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{engine}, {count} processes:\n{ended.stdout[-2000:]}\n{ended.stderr[-6000:]}")
    each = [json.loads(file.read_text()) for file in sorted(place.glob("held-*.json"))]
    return [{key: max(one[key] for one in found) for key in found[0]} for found in zip(*each, strict=True)]


def make_set(folder: Path) -> None:
    from PIL import Image

    folder.mkdir()
    for number in range(4):
        Image.new("RGB", (64, 64), (60 * number, 90, 200 - 40 * number)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a picture, the {number}th")


class Held:
    """Tensors of `learner` and all that are made from now on: bytes now, and at most. What is there besides (the
    dataset) does not count."""

    def __init__(self, learner):
        self.learner, self.peak = learner, 0
        gc.collect()
        gc.freeze()  # out of what `gc.get_objects` goes through: a look is then quick

    def now(self) -> int:
        import torch

        found: dict[int, int] = {}
        made = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
        weights = list(self.learner.parameters())
        pieces = [weight.ds_tensor for weight in weights if hasattr(weight, "ds_tensor")]
        for value in [*made, *weights, *pieces]:
            for one in (value, value.grad if value.is_leaf else None):
                if one is not None and one.device.type == "cpu":
                    storage = getattr(one, "_local_tensor", one).untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
        return sum(found.values())

    def look(self, *_) -> None:
        self.peak = max(self.peak, self.now())

    def watch(self) -> None:
        """Looks twice in every block and at the end, forward and backward, while the weights that it computes with are
        there."""
        for name, module in self.learner.named_modules():
            if name.endswith(("attn.to_q", "attn.to_q.base_layer", "img_mlp.net.2", "proj_out")):
                module.register_forward_hook(self.look)
                module.register_full_backward_hook(self.look)


def _bytes(tensors) -> int:
    """Of the storages that `tensors` lie in, a storage once."""
    local = [getattr(one, "_local_tensor", one).untyped_storage() for one in tensors]
    return sum({one.data_ptr(): one.nbytes() for one in local}.values())


def _states(optimizer) -> list:
    import torch

    return [one for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)]


def work(engine: str, place: Path) -> int:
    """One process of all runs."""
    import accelerate
    import torch
    from accelerate.state import AcceleratorState, GradientState

    from backend.training import loop, setup
    from backend.training.__main__ import main

    torch.set_num_threads(1)
    found: list[dict[str, float]] = []
    if engine == "DeepSpeed":
        accelerate.Accelerator.prepare = lambda self, *values, **_: values  # no DDP: DeepSpeed is to wrap the learner
        setup._without_gradient = lambda *_: []
    stage = 0

    def train(run) -> str:
        gc.collect()
        found.append((_loft if engine == "FSDP2" else _deepspeed)(run, loop.run_length(run), stage))
        return "complete"

    loop.train = train
    for run in json.loads((place / "runs.json").read_text()):
        stage = run["stage"]
        if engine == "FSDP2" and stage:
            os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage)}
        if main(run["flags"]):
            return 1
        AcceleratorState._reset_state()
        GradientState._reset_state()
        gc.unfreeze()
        gc.collect()
    (place / f"held-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
    return 0


def _groups(run, pace, step: int):
    from backend.training import loop

    batches = loop._epochs(run)(pace.epoch_of(step))
    return loop.of_step(
        batches,
        step % pace.per_epoch,
        processes=run.accelerator.num_processes,
        accumulation=loop._accumulation_steps(run),
    )


def _loft(run, pace, stage: int) -> dict[str, float]:
    """Steps of the trainer's own."""
    from backend.training import loop

    held, before = Held(run.learner), []
    held.watch()
    for optimizer in run.optimizers:
        _before(optimizer, held, before)
    for step in range(STEPS):
        held.peak = 0
        loss = loop.train_step(run, _groups(run, pace, step))
        held.look()
    return _row(held, before[-1], run.learner.parameters(), run.optimizers, loss)


def _before(optimizer, held: Held, before: list[int]) -> None:
    """Notes what is held each time that `optimizer` is about to step."""
    step: Callable = optimizer.step

    def noted(*arguments, **keywords):
        held.look()
        before.append(held.now())
        found = step(*arguments, **keywords)
        held.look()
        return found

    optimizer.step = noted


def _row(held: Held, before: int, weights, optimizers, loss: float) -> dict[str, float]:
    gc.collect()
    between, states = held.now(), _bytes(one for optimizer in optimizers for one in _states(optimizer))
    return {
        "weights": _bytes(weights),
        "gradients": before - between,
        "optimizer": states,
        "between": between,
        "peak": held.peak,
        "loss": loss,
    }


def _deepspeed(run, pace, stage: int) -> dict[str, float]:
    """The same steps by DeepSpeed's engine."""
    import deepspeed
    import torch

    held, learner, config = Held(run.learner), run.learner, run.config.training
    block = sum(weight.numel() for weight in learner.parts["dit"].transformer_blocks[0].parameters())
    half = learner.dtype == torch.bfloat16
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "gradient_clipping": config.max_grad_norm or 0.0,
        "bf16": {"enabled": half},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": block,
            "allgather_bucket_size": block,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": block,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
        },
    }
    optimizer = run.optimizers[0]
    optimizer = getattr(optimizer, "optimizer", optimizer)
    run.optimizers.clear()
    engine, *_ = deepspeed.initialize(model=learner, optimizer=optimizer, config=settings, dist_init_required=False)
    held.watch()
    before: list[int] = []
    inner = engine.optimizer.optimizer
    _before(inner, held, before)
    for step in range(STEPS):
        held.peak = 0
        groups = _groups(run, pace, step)
        count = sum(len(batch.items) for group in groups for batch in group)
        errors = torch.zeros(())
        for group in groups:
            batch = group[run.accelerator.process_index]
            # it averages over turns and processes; the scale takes that back to the mean over all samples of a step
            material = run.source.load_batch(batch, scale=run.accelerator.num_processes * len(groups) / count)
            loss, each = engine(material, run.config.loss)
            engine.backward(loss)
            engine.step()
            errors += each.sum()
        held.look()
        mean = float(run.accelerator.reduce(errors, reduction="sum")) / count
    weights = [*learner.parameters(), *(one for group in inner.param_groups for one in group["params"])]
    weights += [weight.ds_tensor for weight in learner.parameters() if hasattr(weight, "ds_tensor")]
    return _row(held, before[-1], weights, [inner], mean)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        sys.exit(work(sys.argv[2], Path(sys.argv[3])))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], choices=(1, 2, 4))
    parser.add_argument("--python", help="an interpreter that has deepspeed, for its column")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--engines", nargs="+", default=["FSDP2", "DeepSpeed"], choices=("FSDP2", "DeepSpeed"))
    given = parser.parse_args()
    run_all(given.processes, given.python, given.layers, given.ways, given.engines)
