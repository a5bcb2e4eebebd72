"""The worker as a process: what goes in and what comes out, with the starter model and with the painted one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy
import psutil
import pytest
from PIL import Image
from safetensors.numpy import save_file

from backend.planner import history
from backend.schema.messages import Event, from_line
from backend.schema.paths import PROJECT, Places
from backend.system import gpu_probe as cards

LAST = ("result", "cancelled", "trouble", "loaded", "unloaded", "estimate")


class Talk:
    """A worker and everything it has said."""

    def __init__(self, data: Places, *flags: str):
        env = {**os.environ, "LOFT_DATA": str(data.root), "PYTHONPATH": str(PROJECT), "OMP_WAIT_POLICY": "PASSIVE"}
        self.log = (data.root / "log.txt").open("wb")
        self.child = subprocess.Popen(
            [sys.executable, "-m", "backend.engine", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            cwd=data.root,
            env=env,
        )
        self.events: list[Event] = []
        self.strays: list[bytes] = []
        self._news = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.child.stdout:
            event = from_line(line.decode())
            with self._news:
                if event is None:
                    self.strays.append(line)
                else:
                    self.events.append(event)
                self._news.notify_all()

    def say(self, **values) -> None:
        self.child.stdin.write((json.dumps(values) + "\n").encode())
        self.child.stdin.flush()

    def wait(self, wanted, seconds: float = 240) -> Event:
        """The first event that `wanted` is true of."""
        with self._news:
            found = self._news.wait_for(lambda: next((e for e in self.events if wanted(e)), None), timeout=seconds)
        assert found, f"not heard: {[e.event for e in self.events]}, log: {Path(self.log.name).read_text()[-2000:]}"
        return found

    def answer(self, id: str, seconds: float = 240) -> Event:
        return self.wait(lambda e: e.id == id and e.event in LAST, seconds)

    def end(self) -> int:
        if not self.child.stdin.closed:
            self.child.stdin.close()
        try:
            return self.child.wait(60)
        finally:
            self.child.kill()
            self.log.close()


@pytest.fixture
def talk(data):
    talks = []

    def start(*flags: str) -> Talk:
        talks.append(Talk(data, *flags))
        return talks[-1]

    yield start
    for one in talks:
        one.end()


@pytest.fixture(scope="module")
def starter(tmp_path_factory):
    """One worker with the starter model for the tests below, which therefore keep their order; the last one ends it."""
    data = Places(tmp_path_factory.mktemp("worker") / "data")
    data.root.mkdir()
    worker = Talk(data)
    yield worker, data
    worker.end()


def named(event: str, id: str = ""):
    return lambda e: e.event == event and id in ("", e.id)


def test_the_painted_worker_draws_cancels_and_ends(talk, data):
    worker = talk("--fake")
    ready = worker.wait(named("ready"))
    assert ready.values["fake"] is True
    worker.say(
        command="generate",
        id="a",
        request={"num_inference_steps": 3, "count": 2, "seed": 2**53 - 2},
        folder=str(data.outputs),
    )
    worker.say(command="generate", id="b", request={"num_inference_steps": 200})
    worker.say(command="generate", id="c", request={"num_inference_steps": 2})
    result = worker.answer("a")
    assert result.event == "result" and result.values["seeds"] == [2**53 - 2, 2**53 - 1]
    for path, seed in zip(result.values["pictures"], result.values["seeds"]):
        with Image.open(path) as picture:
            chunk = json.loads(picture.info["loft"])
        assert chunk["seed"] == str(seed) and chunk["request"]["num_inference_steps"] == 3
    worker.wait(named("step", "b"))
    worker.say(command="cancel", id="c")  # while it waits
    worker.say(command="cancel", id="b")
    assert worker.answer("b", 20).event == "cancelled"
    assert worker.answer("c", 20).event == "cancelled"
    assert worker.end() == 0
    assert not worker.strays


def test_the_painted_worker_needs_no_torch():
    code = "import sys, backend.engine.__main__, backend.engine.worker.fake; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT, timeout=200).returncode == 0


def test_what_is_no_command_is_answered_in_a_sentence(talk):
    worker = talk("--fake")
    worker.child.stdin.write(
        b'{"command": "generate", "id": \n\xff\xfe\n[1]\n{"command": 3}\n' + b"[" * 100_000 + b"\n"
    )
    worker.say(command="sing", id="x")
    worker.say(command="generate", id="y", request={"heigth": 3})
    worker.say(command="generate", id="z", request=[3])
    assert "sing" in worker.answer("x").values["message"]
    assert "heigth" in worker.answer("y").values["message"]
    worker.answer("z")
    assert sum(e.event == "trouble" and e.id == "" for e in worker.events) == 5
    worker.say(command="cancel", id="never heard of")
    worker.say(command="load", id="still there")
    assert worker.answer("still there").event == "loaded"
    worker.say(command="quit", id="q")
    assert worker.child.wait(60) == 0


def test_unknown_flags_end_in_a_sentence(talk):
    worker = talk("--fast")
    assert "--fast" in worker.wait(named("trouble")).values["message"]
    assert worker.child.wait(60) != 0


REQUEST = {"prompt": "a red apple", "num_inference_steps": 4, "seed": 5}


@pytest.mark.torch
def test_the_starter_draws_and_stays_loaded(starter):
    worker, data = starter
    ready = worker.wait(named("ready"))
    assert ready.values["device"] and ready.values["total_bytes"] > 0
    folder = str(data.outputs / "2026-01-01")
    worker.say(command="generate", id="one", request={**REQUEST, "count": 2}, folder=folder)
    one = worker.answer("one")
    assert one.event == "result", one
    assert [e.values["step"] for e in worker.events if named("step", "one")(e)] == [1, 2, 3, 4, 1, 2, 3, 4]
    assert {e.values["part"] for e in worker.events if named("loading", "one")(e)} == {"dit", "text_encoder", "vae"}
    assert one.values["seeds"] == [5, 6]
    predicted, measured = one.values["predicted_peak_bytes"], one.values["measured_peak_bytes"]
    assert predicted == pytest.approx(measured, rel=0.02)
    card = cards.choose(cards.probe(), ready.values["device"])  # as the page asks
    assert history.last(data.user / "measured.json", card, "qwen_image")[:2] == (predicted, measured)

    worker.say(command="generate", id="two", request={**REQUEST, "seed": 6}, folder=folder)
    two = worker.answer("two")
    assert not [e for e in worker.events if named("loading", "two")(e)], "it was loaded already"
    with Image.open(one.values["pictures"][1]) as first, Image.open(two.values["pictures"][0]) as again:
        assert first.tobytes() == again.tobytes() and first.size == (128, 128)
        assert json.loads(again.info["loft"])["seed"] == "6"


@pytest.mark.torch
def test_cancel_takes_effect_within_a_step_and_previews_come(starter):
    worker, data = starter
    worker.say(command="generate", id="long", request={**REQUEST, "num_inference_steps": 200}, folder=str(data.outputs))
    preview = worker.wait(named("preview", "long"))
    with Image.open(preview.values["path"]) as picture:
        assert picture.size == (128, 128)
    worker.say(command="cancel", id="long")
    asked_at = time.time()
    assert worker.answer("long").event == "cancelled"
    later = [e for e in worker.events if named("step", "long")(e) and e.time > asked_at]
    assert len(later) <= 2  # one that was under way, and one whose line was being read


@pytest.mark.torch
def test_options_for_speed_are_said_and_only_storage_loads_anew(starter):
    worker, data = starter
    for id, asked, loads in (
        ("cached", {"step_cache": 0.5}, False),
        ("codes", {"fp8_products": True}, True),
        ("plain", {}, True),
    ):
        worker.say(command="generate", id=id, request={**REQUEST, **asked}, folder=str(data.outputs))
        result = worker.answer(id)
        assert bool([e for e in worker.events if named("loading", id)(e)]) == loads
        assert {"cached": "Step cache 0.5", "codes": "multiplied in FP8", "plain": ""}[id] in "".join(
            result.values["notes"]
        )
        assert bool(result.values["notes"]) == (id != "plain")


@pytest.mark.torch
def test_bad_requests_are_answered_in_a_sentence_and_the_worker_goes_on(starter):
    worker, data = starter
    _ask_badly(worker, data, REQUEST)
    (data.root / "file").write_text("not a folder")
    worker.say(command="generate", id="disk", request=REQUEST, folder=str(data.root / "file" / "day"))
    assert worker.answer("disk").values["kind"] == "cannot_write"
    worker.say(command="generate", id="after", request=REQUEST, folder=str(data.outputs))
    assert worker.answer("after").event == "result"
    assert not list(data.root.rglob("*.tmp"))


@pytest.mark.torch
def test_loras_act_with_a_receipt_and_broken_ones_are_said(starter):
    worker, data = starter
    data.loras.mkdir()
    lora, broken = data.loras / "apples.safetensors", data.loras / "broken.safetensors"
    dice = numpy.random.default_rng(0)
    width = 192
    for_layer = {"A": (4, width), "B": (width, 4)}
    save_file(
        {
            f"transformer_blocks.{n}.attn.to_v.lora_{which}.default.weight": dice.normal(size=shape).astype("float32")
            * 0.3
            for n in range(3)
            for which, shape in for_layer.items()
        },
        lora,
    )
    broken.write_bytes(lora.read_bytes()[:-10])
    pictures = {}
    for id, uses in (("plain", []), ("lora", [lora]), ("broken", [lora, broken]), ("again", [])):
        loras = [{"path": str(path), "strength": 1.0} for path in uses]
        worker.say(command="generate", id=id, request={**REQUEST, "loras": loras}, folder=str(data.outputs))
        pictures[id] = worker.answer(id)
    assert pictures["broken"].event == "trouble" and "broken.safetensors" in pictures["broken"].values["message"]
    (receipt,) = pictures["lora"].values["loras"]
    assert receipt["layers_applied"] == receipt["layers_found"] == 3 and receipt["name"] and receipt["hash"]
    bytes_of = {}
    for id in ("plain", "lora", "again"):
        with Image.open(pictures[id].values["pictures"][0]) as picture:
            bytes_of[id] = picture.tobytes()
            named = [{**one, "path": Path(one["path"]).name} for one in pictures[id].values["loras"]]
            assert json.loads(picture.info["loft"])["loras"] == named  # a picture that is passed on names no folder
    assert bytes_of["plain"] == bytes_of["again"] != bytes_of["lora"]


@pytest.mark.torch
def test_unload_gives_the_memory_back(starter):
    worker, _ = starter
    rss = [psutil.Process(worker.child.pid).memory_info().rss]
    for number in range(6):
        worker.say(command="load", id=f"l{number}", model="loft/starter")
        assert worker.answer(f"l{number}").event == "loaded"
        worker.say(command="unload", id=f"u{number}")
        assert worker.answer(f"u{number}").event == "unloaded"
        rss.append(psutil.Process(worker.child.pid).memory_info().rss)
    assert rss[-1] - rss[1] < 8 * 2**20, [value // 2**20 for value in rss]


@pytest.mark.torch
def test_the_end_of_stdin_ends_the_worker_at_work(starter):
    worker, data = starter
    worker.say(
        command="generate", id="end", request={"num_inference_steps": 200, "count": 60}, folder=str(data.outputs)
    )
    worker.wait(named("step", "end"))
    worker.child.stdin.close()
    assert worker.child.wait(60) == 0
    assert not worker.strays


def _ask_badly(worker: Talk, data: Places, request: dict) -> None:
    broken = data.models / "my" / "broken"
    broken.mkdir(parents=True)
    (broken / "model.safetensors").write_bytes(b"\xff" * 100)
    for id, change, word in (
        ("b1", {"model": "no/such"}, "no/such"),
        ("b2", {"width": 100}, "100"),
        ("b10", {"width": 160}, "160 x 128"),
        ("b3", {"input_image": str(PROJECT / "pyproject.toml")}, "pyproject.toml"),
        ("b4", {"input_image": str(data.root / "gone.png")}, "gone.png"),
        ("b5", {"model": "my/broken"}, "model.safetensors"),
        ("b6", {"num_inference_steps": 0}, "0"),
        ("b7", {"seed": -1}, "-1"),
        ("b8", {"guidance": float("nan")}, "nan"),
        ("b9", {"model": "../../../etc"}, "etc"),
    ):
        worker.say(command="generate", id=id, request={**request, **change}, folder=str(data.outputs))
        answer = worker.answer(id)
        assert answer.event == "trouble" and answer.values["kind"] != "unexpected", answer
        assert word in answer.values["message"], answer.values


@pytest.mark.torch
def test_running_out_of_memory_is_a_sentence_and_lets_the_model_go(data):
    import torch

    from backend.engine.worker.commands import Work

    said = []

    class Ears:
        def say(self, event, **values):
            said.append((event, values))

        def should_stop(self, id):
            return False

    work = Work(Ears())
    work.load("a", {"model": "loft/starter"})
    assert work.pipeline is not None and said[-2][0] == "loaded"
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
    trouble = work.explain(error, "generate")
    assert trouble.kind == "out_of_memory" and "GiB" in trouble.message and work.pipeline is None
    assert work.explain(ValueError("x"), "generate") is None
