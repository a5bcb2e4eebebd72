"""What the worker does with a command: find the model, keep it loaded, draw, answer. One model at a time."""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from PIL import Image

from backend import families
from backend.catalog.hub import download
from backend.catalog.models import model_folder
from backend.catalog.models.identify import identify_model
from backend.catalog.spec import ModelSpec
from backend.engine.acceleration import apply
from backend.engine.devices import allocator_limits, device_memory, out_of_memory
from backend.engine.loading import lazy_imports
from backend.engine.pipeline import request_checks
from backend.engine.pipeline.latent_preview import Step
from backend.engine.pipeline.pipeline import Pipeline
from backend.engine.tracing import live_tensors
from backend.engine.worker import loaded_plan
from backend.engine.worker.protocol import Wire
from backend.images.png_metadata import Previews, by_name, free_path, save_png
from backend.planner import history
from backend.planner.costs.model_sizes import compute_dtypes
from backend.schema.memory_plan import VramPlan
from backend.schema.messages import Cancelled, Trouble
from backend.schema.paths import places
from backend.schema.request import (
    GenerationRequest,
    LoraReceipt,
    Result,
    request_from_values,
)
from backend.schema.settings import from_values

MEMORY_SECONDS = 2.0
_DOING = {"load": "loading", "tool": "working on a LoRA"}
TOOL_SECONDS = 0.25  # between two words about how far a tool is


class Work:
    """The model on the card and what it was loaded for."""

    def __init__(self, wire: Wire):
        device_memory.set_threads()
        self.wire = wire
        self.preferences = download.preferences()
        self.device = device_memory.check_device(self.preferences.device)
        self.pipeline: Pipeline | None = None
        self._model = ""
        self.measured = False  # whether the device's speed is known, or cannot be found out
        self._loaded_from: tuple = ()
        self._placing = loaded_plan.Placing()
        self._told_memory = 0.0
        self._libraries_bytes = 0  # on a CPU, of the process beside the weights once everything has been used
        self._peaks: dict[tuple, int] = {}  # what was measured of jobs of a kind since the model was loaded

    def about(self) -> dict:
        card = device_memory.probe(self.device)
        return {
            "device": card.device,
            "name": card.name,
            "total_bytes": card.total_bytes,
            "free_bytes": card.free_bytes,
        }

    def warm_up(self) -> None:
        """Imports what the first request will need, if it is for the usual model; two seconds that nobody waits for."""
        with contextlib.suppress(Trouble):
            import_networks(self._spec(GenerationRequest()).family)

    def measure_speed(self, should_stop: Callable[[], bool]) -> None:
        """Finds out once how fast the device is, for estimates of seconds; later, where others are at work or memory is
        short."""
        from backend.engine.devices import benchmark

        try:
            self.measured = benchmark.measure_once(self.device, here=places(), should_stop=should_stop)
        except Cancelled:
            device_memory.empty_cache(self.device)
        except Exception:  # nothing that anybody waits for; estimates go on from what is assumed
            traceback.print_exc()
            self.measured = True

    def explain(self, error: BaseException, command: str) -> Trouble | None:
        """What an error means, where it means something to a person. Lets the model go where memory ran out."""
        if not out_of_memory.is_oom(error, self.device):
            return None
        error.__traceback__ = None  # its frames hold the tensors
        self._close()
        return out_of_memory.trouble(self.device, error, doing=_DOING.get(command, "drawing"))

    def load(self, id: str, values: dict) -> None:
        request = asked(values) if "request" in values else self._usual_request(values)
        self._ensure(id, request)
        self.wire.say("loaded", id=id, model=request.model)
        self._say_memory()

    def _usual_request(self, values: dict) -> GenerationRequest:
        """What the model is most likely to be asked for next: a picture of its own size."""
        request = asked({"request": {"model": values.get("model", GenerationRequest().model)}})
        spec = self._spec(request)
        wanted = model_folder.request_defaults(spec, families.by_name(spec.family))
        return from_values(GenerationRequest, wanted, base=request)

    def generate(self, id: str, values: dict) -> None:
        request = asked(values)
        folder = Path(values.get("folder") or places().outputs)
        pipeline = self._ensure(id, request, draws=True)
        began = time.monotonic()
        receipts = pipeline.use_loras(request.loras)
        pipeline.notes.clear()
        before = len(pipeline.lower.taken)
        card = device_memory.probe(self.device)
        predicted = loaded_plan.predicted_bytes(pipeline.spec, card, request, self._placing)
        paths: list[Path] = []
        last = time.monotonic()
        kind = (history.kind_of(request), request.loras, bool(request.input_image), request.edit_images)
        with live_tensors.measuring(pipeline, known_bytes=self._peaks.get(kind, 0), looks=not request.compile) as peak:
            for number, picture in enumerate(
                pipeline.draw(request, on_step=self._watcher(id, peak), should_stop=lambda: self.wire.should_stop(id))
            ):
                paths.append(free_path(folder, request.seed + number))
                now = time.monotonic()
                made = self._settings(
                    request, request.seed + number, now - last, receipts, (predicted, peak.highest_bytes)
                )
                save_png(picture, paths[-1], made)
                if request.count > 1:
                    self.wire.say("preview", id=id, path=str(paths[-1]), picture=number)
                last = now
            seconds, highest = time.monotonic() - began, peak.highest_bytes
            if self.device.type == "cpu":
                self._libraries_bytes = max(
                    0, device_memory.allocated(self.device) - live_tensors.weight_bytes(pipeline.parts, self.device)
                )
            went_lower = len(pipeline.lower.taken) > before
            if peak.highest_phase == "decode" and not went_lower:  # the same for every prompt
                self._peaks[kind] = highest
        if not pipeline.lower.taken:  # else it was not the plan's arrangement
            loaded_plan.learn(
                pipeline.spec, card, request, predicted_bytes=predicted, measured_bytes=highest, seconds=seconds
            )
        if went_lower:  # what was fused acts beside the weights now
            receipts = pipeline.use_loras(request.loras)
        self._answer(id, request, paths, seconds, receipts, (predicted, highest))

    def _answer(self, id: str, request, paths: list[Path], seconds: float, receipts, peaks: tuple[int, int]) -> None:
        result = Result(
            pictures=tuple(str(path) for path in paths),
            seeds=tuple(request.seed + number for number in range(len(paths))),
            seconds=seconds,
            loras=receipts,
            predicted_peak_bytes=peaks[0],
            measured_peak_bytes=peaks[1],
            notes=self._notes(),
        )
        self.wire.say("result", id=id, **asdict(result))
        self._say_memory()

    def _settings(
        self,
        request: GenerationRequest,
        seed: int,
        seconds: float,
        receipts: tuple[LoraReceipt, ...],
        peaks: tuple[int, int],
    ) -> dict:
        return {
            "request": by_name(request),
            "seed": seed,
            "seconds": round(seconds, 3),
            "loras": [{**asdict(receipt), "path": Path(receipt.path).name} for receipt in receipts],
            "notes": list(self._notes()),
            "predicted_peak_bytes": peaks[0],
            "measured_peak_bytes": peaks[1],
        }

    def _notes(self) -> tuple[str, ...]:
        """What the plan traded for memory, and what happened while drawing (OOM fallbacks, truncated prompts)."""
        return (*self._placing.notes, *(self.pipeline.notes if self.pipeline is not None else ()))

    def _watcher(self, id: str, peak: live_tensors.Measure):
        previews = Previews(places().cache / "previews", id)

        def on_step(step: Step) -> None:
            peak.step()
            self.wire.say(
                "step",
                id=id,
                step=step.step,
                steps=step.steps,
                picture=step.picture,
                seconds_left=round(step.seconds_left, 3),
            )
            picture: Image.Image | None = step.preview()
            path = previews.write(picture) if picture else None
            if path:
                self.wire.say("preview", id=id, path=str(path), picture=step.picture)
            if time.monotonic() - self._told_memory > MEMORY_SECONDS:
                self._say_memory()

        return on_step

    def unload(self, id: str = "", values: dict | None = None) -> None:
        self._close()
        if values is not None:
            self.wire.say("unloaded", id=id)
            self._say_memory()

    def tool(self, id: str, values: dict) -> None:
        from backend.engine.lora.tools import command_line

        told = 0.0

        def on_progress(done: int, total: int) -> None:
            nonlocal told
            if time.monotonic() - told > TOOL_SECONDS:
                told = time.monotonic()
                self.wire.say("progress", id=id, done=done, total=total)

        answer = command_line.run_tool(values, on_progress=on_progress, should_stop=lambda: self.wire.should_stop(id))
        self.wire.say("result", id=id, **answer)

    def estimate(self, id: str, values: dict) -> None:
        request = asked(values)
        self.wire.say("estimate", id=id, **asdict(self._plan(self._spec(request), request)[0]))

    def _spec(self, request: GenerationRequest) -> ModelSpec:
        path = download.find_model(request.model)
        spec = identify_model(path, families.FAMILIES)
        return model_folder.completed(spec, families.by_name(spec.family))

    def _place(self, spec: ModelSpec, request: GenerationRequest) -> loaded_plan.Placing:
        """How the model is to be placed. Raises Trouble where a CPU would run out of RAM: there it is other programs
        that die."""
        plan, room = self._plan(spec, request)
        if self.device.type == "cpu" and not plan.fits and self.pipeline is not None:
            self._close()  # what is loaded takes of the RAM that is free
            plan, room = self._plan(spec, request)
        if self.device.type == "cpu" and not plan.fits:
            needed, free = (value / device_memory.GIB for value in (plan.peak_low_bytes, device_memory.ram()[1]))
            raise Trouble(
                "does_not_fit",
                f"{request.width} x {request.height} pixels with {spec.title} need {needed:.1f} GiB of RAM; {free:.1f} are free.",
                hint=plan.advice or "Make the picture smaller.",
            )
        return loaded_plan.Placing.of(plan, request, room=room)

    def _plan(self, spec: ModelSpec, request: GenerationRequest) -> tuple[VramPlan, loaded_plan.Room]:
        reserve = int(self.preferences.reserve_gib * device_memory.GIB)
        card = device_memory.probe(self.device, reserve_bytes=None if self.device.type == "cpu" else reserve)
        return loaded_plan.plan_for(spec, card, request, self.preferences), loaded_plan.room_of(spec, card)

    def _ensure(self, id: str, request: GenerationRequest, *, draws: bool = False) -> Pipeline:
        """The pipeline of the request's model, loaded anew only where model, files, preferences or placement ask for
        it. `draws`: the request is drawn next, and what its model cannot do is said before it is loaded."""
        self.preferences = download.preferences()
        if device_memory.check_device(self.preferences.device) != self.device:
            self._close()
            self.device = device_memory.check_device(self.preferences.device)
        spec = self._spec(request)
        family = families.by_name(spec.family)
        model_folder.check_size(spec, family, width=request.width, height=request.height)
        request_checks.check_request(spec, family, request, draws=draws)
        apply.check(self.device, compile=request.compile, fp8_products=request.fp8_products)
        key = (request.model, stamp(spec), self.preferences, request.fp8_products)
        if self.pipeline is not None and key != self._loaded_from:
            self._close()
        if self.pipeline is None or not self._placing.covers(request):
            placing = self._place(spec, request)
            if self.pipeline is not None and placing.placed != self._placing.placed:
                self._close()
                placing = self._place(spec, request)  # with the memory that is free now
            self._placing = placing
        if self.pipeline is None:
            self.pipeline = self._load(id, spec, request.fp8_products)
            self._loaded_from = key
        return self.pipeline

    def _load(self, id: str, spec: ModelSpec, fp8_products: bool) -> Pipeline:
        import_networks(spec.family)
        allocator_limits.cap(self.device)
        told = 0.0

        def on_bytes(part: str, done: int, total: int) -> None:
            nonlocal told
            if self.wire.should_stop(id):
                raise Cancelled
            if done == total or time.monotonic() - told > 0.1:
                told = time.monotonic()
                self.wire.say("loading", id=id, part=part, done_bytes=done, total_bytes=total)

        return Pipeline(
            spec,
            dtype=device_memory.best_dtype(self.device, bears=compute_dtypes(spec.family)),
            device=self.device,
            configs=apply.configs(self._placing.configs, fp8_products),
            vram_limit_bytes=self._placing.vram_limit_bytes,
            tiled_vae=self._placing.tiled_vae,
            halves_apart=self._placing.halves_apart,
            resident_blocks=self._placing.resident_blocks,
            fp8_products=fp8_products,
            allow_fp8=self.preferences.allow_fp8,
            allow_tiles=self.preferences.allow_tiles,
            on_bytes=on_bytes,
        )

    def _close(self) -> None:
        if self.pipeline is not None:
            self.pipeline.close()
            self.pipeline, self._loaded_from = None, ()
            self._peaks.clear()
            device_memory.empty_cache(self.device)

    def _say_memory(self) -> None:
        self._told_memory = time.monotonic()
        self.wire.say("memory", **live_tensors.in_use(self.device), libraries_bytes=self._libraries_bytes)


def import_networks(family: str) -> None:
    for part in families.by_name(family).PARTS.values():
        lazy_imports.import_module(part.network.partition(":")[0])
    gc.freeze()  # what was imported stays: no later collection need look at it again


def asked(values: dict) -> GenerationRequest:
    """The request in a command. Raises Trouble where there is none, or a bad one."""
    request = values.get("request")
    if not isinstance(request, dict):
        raise Trouble("bad_command", "The command brings no request.")
    return request_from_values(request)


def stamp(spec: ModelSpec) -> tuple:
    """Changes when a file of the model does."""
    files = sorted({file for part in spec.parts.values() for file in part.files})
    return tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
