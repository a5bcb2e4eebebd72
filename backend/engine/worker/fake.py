"""The worker's loop without a model: a painted gradient, for tests of whatever talks to a worker. No torch."""

from __future__ import annotations

import random
import time
from dataclasses import asdict
from pathlib import Path

from PIL import Image, ImageDraw

from backend.engine.worker.protocol import Wire
from backend.images.png_metadata import Previews, by_name, free_path, save_png
from backend.schema.messages import Cancelled, Trouble
from backend.schema.paths import places
from backend.schema.request import GenerationRequest, Result, request_from_values

STEP_SECONDS = 0.05
PART_BYTES = 2**20


class FakeWork:
    """Answers as `work.Work` does."""

    def __init__(self, wire: Wire):
        self.wire = wire
        self.loaded = ""
        self.measured = True  # there is nothing to measure

    def about(self) -> dict:
        return {"device": "cpu", "name": "Painted gradient (no model)", "fake": True}

    def warm_up(self) -> None:
        """Nothing needs it."""

    def explain(self, error: Exception, command: str) -> Trouble | None:
        return None

    def load(self, id: str, values: dict) -> None:
        self._ensure(id, str(values.get("model") or "loft/starter"))
        self.wire.say("loaded", id=id, model=self.loaded)

    def _ensure(self, id: str, model: str) -> None:
        if model == self.loaded:
            return
        for part in ("text_encoder", "dit", "vae"):
            self.wire.say("loading", id=id, part=part, done_bytes=PART_BYTES, total_bytes=PART_BYTES)
        self.loaded = model

    def generate(self, id: str, values: dict) -> None:
        request = request_from_values(values["request"] if isinstance(values.get("request"), dict) else {})
        folder = Path(values.get("folder") or places().outputs)
        began = time.monotonic()
        self._ensure(id, request.model)
        previews = Previews(places().cache / "previews", id)
        paths, seeds = [], []
        for number in range(request.count):
            picture = self._paint(id, request, number, previews)
            seeds.append(request.seed + number)
            paths.append(free_path(folder, seeds[-1]))
            settings = {"request": by_name(request), "seed": seeds[-1], "loras": [], "notes": []}
            save_png(picture, paths[-1], {**settings, "seconds": time.monotonic() - began})
        result = Result(tuple(map(str, paths)), tuple(seeds), time.monotonic() - began)
        self.wire.say("result", id=id, **asdict(result))

    def _paint(self, id: str, request: GenerationRequest, number: int, previews: Previews) -> Image.Image:
        steps = request.num_inference_steps
        picture = gradient(request.width, request.height, f"{request.prompt}|{request.seed + number}")
        for step in range(1, steps + 1):
            if self.wire.should_stop(id):
                raise Cancelled
            time.sleep(STEP_SECONDS)
            left = (steps - step) * STEP_SECONDS
            self.wire.say("step", id=id, step=step, steps=steps, picture=number, seconds_left=left)
            if step < steps and step % 4 == 0:
                small = picture.resize((64, 64)).resize(picture.size)
                path = previews.write(small)
                if path:
                    self.wire.say("preview", id=id, path=str(path))
        if self.wire.should_stop(id):
            raise Cancelled
        return picture

    def unload(self, id: str = "", values: dict | None = None) -> None:
        self.loaded = ""
        if values is not None:
            self.wire.say("unloaded", id=id)

    def tool(self, id: str, values: dict) -> None:
        raise Trouble("not_supported", "The painted engine has no tools.")

    def estimate(self, id: str, values: dict) -> None:
        raise Trouble("not_supported", "The painted engine needs no memory worth an estimate.")


def gradient(width: int, height: int, words: str) -> Image.Image:
    """Colours that depend on `words` alone."""
    dice = random.Random(words)
    first, last = ([dice.randrange(256) for _ in range(3)] for _ in range(2))
    picture = Image.new("RGB", (width, height))
    draw = ImageDraw.Draw(picture)
    for y in range(height):
        share = y / max(1, height - 1)
        draw.line([(0, y), (width, y)], tuple(round(a + (b - a) * share) for a, b in zip(first, last)))
    return picture
