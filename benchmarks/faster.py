"""What the options that trade exactness or a start for speed cost and bring: `python benchmarks/faster.py [MODEL]` (the
starter by default).

Prints the tables of docs/engine.md: compiled blocks, cached steps and FP8 products against the plain computation, in
CPU time of this process and interleaved, with the difference of the pictures (mean of 255) and of the latents (relative
L2).
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy
import torch

from backend import families
from backend.catalog.hub import download
from backend.catalog.models.identify import identify_model
from backend.engine.acceleration import compile_blocks
from backend.engine.devices import device_memory
from backend.engine.pipeline.pipeline import Pipeline
from backend.schema.request import GenerationRequest

PROMPTS = ("a red apple", "a green frog", "two yellow cups", "a blue car")
THRESHOLDS = (0.1, 0.2, 0.3, 0.5)


class Bench:
    """A loaded model and what was decoded last."""

    def __init__(self, model: str, **options):
        spec = identify_model(download.find_model(model), families.FAMILIES)
        self.pipeline = Pipeline(spec, dtype=torch.float32, device="cpu", **options)
        self.latents: list[torch.Tensor] = []
        decode = self.pipeline.decode
        self.pipeline.decode = lambda latents, **rest: (self.latents.append(latents), decode(latents, **rest))[1]

    def draw(self, request: GenerationRequest, **asked) -> tuple[list[numpy.ndarray], list[torch.Tensor], float]:
        """Pictures, latents and CPU seconds of the four prompts."""
        self.latents.clear()
        began = time.process_time()
        pictures = []
        for seed, prompt in enumerate(PROMPTS):
            self.pipeline.notes.clear()
            made = self.pipeline.generate(replace(request, prompt=prompt, seed=seed, **asked))[0]
            pictures.append(numpy.asarray(made, dtype=float))
        return pictures, list(self.latents), time.process_time() - began

    def against(
        self, request: GenerationRequest, plain: dict, asked: dict, rounds: int = 3
    ) -> tuple[float, float, float]:
        """(time ratio, picture difference, latent difference) of `asked` against `plain`, by medians of interleaved
        rounds."""
        ratios = []
        for _ in range(rounds):
            (exact, true, before), (ours, near, after) = self.draw(request, **plain), self.draw(request, **asked)
            ratios.append(after / before)
        pictures = statistics.fmean(float(numpy.abs(a - b).mean()) for a, b in zip(exact, ours))
        latents = statistics.fmean(float((a - b).norm() / a.norm()) for a, b in zip(true, near))
        return statistics.median(ratios), pictures, latents


def cached(bench: Bench) -> None:
    print(f"{'cached steps':14} {'steps':>5} {'reused':>9} {'time':>6} {'picture':>8} {'latents':>8}")
    for steps in (20, 40):
        request = GenerationRequest(num_inference_steps=steps)
        for threshold in THRESHOLDS:
            ratio, picture, latents = bench.against(request, {}, {"step_cache": threshold})
            reused = [
                note.split(":")[1].split(" passes")[0] for note in bench.pipeline.notes if note.startswith("Step")
            ]
            print(
                f"{threshold:<14g} {steps:>5} {reused[-1].strip():>9.9} {ratio:>6.2f} {picture:>8.2f} {latents:>8.3f}",
                flush=True,
            )


def compiles(bench: Bench) -> None:
    from torch._inductor.compile_fx import compile_fx

    graphs = []
    compile_blocks.BACKEND = lambda graph, inputs: (graphs.append(graph), compile_fx(graph, inputs))[1]
    request = GenerationRequest(num_inference_steps=12)
    began = time.monotonic()
    bench.draw(replace(request, num_inference_steps=1), compile=True)
    first = time.monotonic() - began
    ratio, picture, latents = bench.against(request, {}, {"compile": True})
    print(
        f"compiled: {len(graphs)} graph(s), {first:.0f} s before the first pictures, time {ratio:.2f}, picture "
        f"{picture:.3f}, latents {latents:.1e}"
    )


def multiplied(model: str) -> None:
    bench, exact = Bench(model, fp8_products=True), Bench(model)
    request = GenerationRequest(num_inference_steps=12)
    ratio, picture, latents = bench.against(request, {}, {"fp8_products": True})
    print(f"FP8 products against FP8 storage: time {ratio:.2f}, picture {picture:.2f}, latents {latents:.3f}")
    true = exact.draw(request)
    for name, asked in (("storage", {}), ("products", {"fp8_products": True})):
        ours = bench.draw(request, **asked)
        away = statistics.fmean(float((a - b).norm() / a.norm()) for a, b in zip(true[1], ours[1]))
        seen = statistics.fmean(float(numpy.abs(a - b).mean()) for a, b in zip(true[0], ours[0]))
        print(f"FP8 {name} against float32: picture {seen:.2f}, latents {away:.3f}")


def main() -> None:
    device_memory.set_threads(1)
    model = sys.argv[1] if len(sys.argv) > 1 else "loft/starter"
    bench = Bench(model)
    bench.draw(GenerationRequest(num_inference_steps=1))
    cached(bench)
    compiles(bench)
    multiplied(model)


if __name__ == "__main__":
    main()
