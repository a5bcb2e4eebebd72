"""Whatever lies in the data folder: the page opens, every tab is drawn at every tick, in bounded time, and nothing is answered by an error."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import threading
import time
from pathlib import Path

import gradio as gr
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.catalog.models import library
from backend.catalog.spec import LoraSpec
from backend.families import FAMILIES
from backend.host.engine import pending_requests
from backend.host.engine.client import Engine
from backend.host.engine.snapshot import STALLED_SECONDS, EngineSnapshot, Job, silent_seconds
from backend.images.png_metadata import save_png
from backend.schema.messages import Trouble, to_line
from backend.schema.paths import Places
from backend.schema.request import GenerationRequest
from studio import app
from studio.panels import engine_status
from studio.state.context import Studio
from studio.state.saved_forms import CHOICES, known_choices
from studio.widgets import handler_errors

TABS = ("generate", "models", "train")
EXAMPLES = settings(
    max_examples=int(os.environ.get("LOFT_EXAMPLES", "6")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Page:
    """The page's own functions on a data folder, without a browser; `faults` are what they did not foresee."""

    def __init__(self, places: Places, faults: list):
        self.places, self.faults = places, faults
        self.studio = Studio(places, Engine(places, fake=True), FAMILIES)
        page = app.build(self.studio)
        self.functions = {function.name: function for function in page.fns.values()}

    def call(self, name: str, *values):
        function = self.functions[name]
        remembered = [isinstance(one, gr.BrowserState) for one in function.inputs][: len(values)]
        values = [known_choices(value) if kept else value for value, kept in zip(values, remembered, strict=True)]
        out = function.fn(*values)
        str(out).encode()  # half a character could not be sent
        assert not self.faults, self.faults
        return out

    def look(self, **choice: str) -> str:
        """Opens the page and draws every tab twice; gives all that was drawn."""
        choice = {**CHOICES, **choice}
        drawn = [self.call("load", choice, "generate", 1)]
        seen: dict = {}
        for tab in (*TABS, *TABS):
            drawn.append(self.call("tick", choice, seen, 48, 0, "", "all", tab))
            seen = drawn[-1][-1]
        return str(drawn)

    def close(self) -> None:
        self.studio.engine.stop()


@pytest.fixture
def faults(monkeypatch):
    found: list = []
    why = handler_errors.why

    def noted(error):
        if not isinstance(error, Trouble):
            found.append(error)
        return why(error)

    monkeypatch.setattr(handler_errors, "why", noted)
    return found


@pytest.fixture
def page(data, faults):
    one = Page(data, faults)
    yield one
    one.close()


# Values that files should not hold


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
    | st.sampled_from(["x" * 300, "a\0b", "\ud800", "../../etc/passwd", "/dev/zero", "//server/share/x", "\\\\server\\share\\x", "~", "1e999",
                       10**400, 2**63, -1, float("inf"), "<script>", "y" * 5000])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def json_of(keys: tuple[str, ...]):
    """Texts of JSON objects with these keys and any values, and what is no JSON at all."""
    objects = st.dictionaries(st.sampled_from(keys) | st.text(max_size=4), VALUES, max_size=6)
    deep = st.sampled_from(["[" * 200_000, '{"a":' * 100_000, "[" * 70 + "]" * 70])
    return (objects | VALUES).map(json.dumps).map(str.encode) | deep.map(str.encode) | st.binary(max_size=30)


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


REQUEST = (
    "model",
    "prompt",
    "width",
    "height",
    "seed",
    "count",
    "loras",
    "input_image",
    "edit_images",
    "guidance",
    "fresh_seed",
)
TRAINING = (
    "model",
    "name",
    "dataset_base_path",
    "dataset_metadata_path",
    "customized_optimizer",
    "lora_rank",
    "sample_prompts",
    "devices",
)
FORMATS = {  # where each lies, and the keys that it has
    "user/request.json": REQUEST,
    "user/training.json": TRAINING,
    "user/preferences.json": ("model_folders", "lora_folders", "reserve_gib", "device", "theme", "offline"),
    "user/lora_families.json": ("a", "b"),
    "user/measured.json": ("cpu/qwen_image",),
    "user/calibration.json": ("cpu",),
    "user/studio.json": ("pid", "created", "argv", "port"),
    "user/worker.json": ("pid", "created", "argv"),
    "user/tool/process.json": ("pid", "created", "argv", "tool", "out"),
    "user/memory/x.json": ("tables", "trouble"),
    "user/presets/mine.json": ("title", "about", "values", *TRAINING),
    "user/queue/1.json": ("id", "submitted_at", "request"),
    "user/failed/1.json": ("ended_at", "request", "trouble"),
    "cache/loras.json": ("key", "files"),
    "cache/models.json": ("key", "files"),
    "cache/hashes.json": ("a",),
    "runs/2026-01-01_00-00-00_x/config.json": TRAINING,
    "runs/2026-01-01_00-00-00_x/process.json": ("pid", "created", "argv", "events_at", "by"),
    "models/a/b/model_index.json": ("_class_name", "_sizes", "_defaults"),
    "models/a/b/transformer/config.json": ("_class_name", "num_layers"),
    "datasets/mine/loft.json": ("name", "trigger_word", "sample_prompts"),
    "datasets/mine/metadata.json": ("image", "prompt", "edit_image"),
}  # fmt: skip


def test_any_content_of_any_file_leaves_every_tab(page, data):
    @EXAMPLES
    @given(st.fixed_dictionaries({}, optional={name: json_of(keys) for name, keys in FORMATS.items()}))
    def look(contents):
        for name, content in contents.items():
            put(data.root / name, content)
        page.look()
        Engine(data, fake=True).stop()
        for name in FORMATS:
            (data.root / name).unlink(missing_ok=True)

    look()


EVENTS = (
    "started",
    "resumed",
    "phase",
    "step",
    "sample",
    "validation",
    "checkpoint",
    "saved",
    "memory",
    "note",
    "trouble",
    "finished",
)
KEYS = ("event", "time", "id", "step", "total_steps", "epoch", "loss", "seconds", "path", "prompt", "name", "done", "total", "message",
        "hint", "detail", "kind", "reason", "restored", "not_restored", "device_bytes", "model")  # fmt: skip


def test_any_events_of_a_run_leave_every_tab(page, data):
    event = st.fixed_dictionaries(
        {"event": st.sampled_from(EVENTS)}, optional=dict.fromkeys(KEYS[1:], SCALARS | VALUES)
    )

    @EXAMPLES
    @given(st.lists(event.map(json.dumps).map(str.encode) | st.binary(max_size=40), max_size=8))
    def look(lines):
        put(data.runs / "2026-01-01_00-00-00_x" / "config.json", b"{}")
        put(data.runs / "2026-01-01_00-00-00_x" / "events.jsonl", b"\n".join(lines) + b"\n")
        page.look()
        shutil.rmtree(data.runs)

    look()


def test_any_settings_inside_a_picture_leave_every_tab(page, data):
    from PIL import Image

    from studio.generate.events import restore
    from studio.state.output_files import read_settings

    receipt = st.dictionaries(
        st.sampled_from(("name", "path", "hash", "strength", "mode", "layers_applied", "unused", "notes")), VALUES
    )
    told = st.fixed_dictionaries(
        {},
        optional={
            "request": st.dictionaries(st.sampled_from(REQUEST), VALUES) | VALUES,
            "seed": VALUES,
            "seconds": VALUES,
            "loras": st.lists(receipt | VALUES, max_size=3) | VALUES,
            "notes": VALUES,
            "measured_peak_bytes": VALUES,
        },
    )
    path = data.outputs / "2026-01-01" / "a.png"

    @EXAMPLES
    @given(told)
    def look(values):
        path.unlink(missing_ok=True)
        save_png(Image.new("RGB", (8, 8)), path, values)
        page.look(picture=str(path))
        try:
            found = read_settings(path)
        except Trouble:
            return
        restore(found, models=["loft/starter"], loras=[], places=data)

    look()


ODD_PNGS = {
    "layers": {"loras": [{"layers_applied": "x"}]},
    "strength": {"loras": [{"strength": "abc"}]},
    "notes": {"notes": 5},
    "start": {"request": {"input_image": 5}},
    "unused": {"loras": [{"unused": [1]}]},
    "mode": {"loras": [{"mode": {"a": 1}}]},
}


def test_a_picture_with_odd_values_is_shown_with_a_sentence(page, data):
    from PIL import Image

    for what, values in ODD_PNGS.items():
        save_png(Image.new("RGB", (8, 8)), data.outputs / "2026-01-01" / f"{what}.png", {"request": {}, **values})
        drawn = page.look(picture=str(data.outputs / "2026-01-01" / f"{what}.png"))
        assert f"The settings inside {what}.png cannot be read" in drawn


# Names and kinds of files


@pytest.mark.skipif(os.name == "nt", reason="names that Windows does not have")
def test_files_with_names_in_no_encoding_and_files_that_are_none(page, data):
    for folder in (
        data.outputs / "2026-01-01",
        data.runs,
        data.loras,
        data.models,
        data.datasets,
        data.user / "presets",
    ):
        folder.mkdir(parents=True)
        where = os.fsencode(folder)
        for ending in (b".png", b".safetensors", b".json", b""):
            Path(os.fsdecode(where + b"/\xff" + ending)).mkdir() if not ending else Path(
                os.fsdecode(where + b"/\xff" + ending)
            ).write_bytes(b"x")
        for number, ending in enumerate((".png", ".safetensors", ".json")):
            os.mkfifo(folder / f"pipe{number}{ending}")
            (folder / f"zero{number}{ending}").symlink_to("/dev/zero")
            (folder / f"loop{number}{ending}").symlink_to(folder / f"loop{number}{ending}")
    bad = Path(os.fsdecode(os.fsencode(data.runs) + b"/\xfe"))
    put(bad / "config.json", b"{}")
    began = time.monotonic()
    page.look()
    assert time.monotonic() - began < 20


BESIDE = (
    "loras/a.json",
    "loras/a.civitai.info",
    "loras/adapter_config.json",
    "models/m/model_index.json",
    "models/m/transformer/config.json",
    "models/m/transformer/diffusion_pytorch_model.safetensors.index.json",
)


@pytest.mark.skipif(os.name == "nt", reason="POSIX")
@pytest.mark.parametrize("name", BESIDE)
def test_what_lies_beside_weights_is_read_in_bounded_time_and_memory(data, name):
    from safetensors.numpy import save_file

    factors = {
        "transformer_blocks.0.attn.to_q.lora_A.weight": (4, 8),
        "transformer_blocks.0.attn.to_q.lora_B.weight": (8, 4),
    }
    for path in ("loras/a", "loras/b", "models/m/transformer/diffusion_pytorch_model"):
        put(data.root / "models/m/model_index.json", b'{"transformer": ["diffusers", "QwenImageTransformer2DModel"]}')
        (data.root / f"{path}.safetensors").parent.mkdir(parents=True, exist_ok=True)
        save_file({key: np.zeros(shape, "f4") for key, shape in factors.items()}, data.root / f"{path}.safetensors")
    beside = data.root / name
    links = [functools.partial(os.symlink, target) for target in ("/dev/zero", "/dev/urandom")]
    texts = [
        lambda path, said=said: path.write_bytes(said) for said in (b"[" * 200_000, b'{"trainedWords": 5}', b"\xff")
    ]
    for make in (os.mkfifo, os.mkdir, *links, *texts):
        beside.unlink(missing_ok=True)
        make(beside)
        found = []
        reading = threading.Thread(target=lambda found=found: found.append(_listed(data)), daemon=True)
        reading.start()
        reading.join(10)
        assert found and len(found[0][0]) == 2, "the LoRA is listed all the same"
        assert all(isinstance(entry, LoraSpec | Trouble) for entry in found[0][0])
        beside.rmdir() if beside.is_dir() else None


def _listed(data: Places) -> tuple:
    return library.scan_loras([data.loras], FAMILIES), library.scan_models([data.models], FAMILIES)


@pytest.mark.skipif(os.name == "nt", reason="POSIX")
def test_pipes_and_folders_in_the_place_of_the_users_files(page, data):
    for make in (os.mkfifo, os.mkdir):
        for name in (
            "request.json",
            "training.json",
            "preferences.json",
            "queue",
            "failed",
            "measured.json",
            "presets",
        ):
            path = data.user / name
            path.parent.mkdir(exist_ok=True)
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            make(path)
        page.look()
        Engine(data, fake=True).stop()


STRANGE = ("x" * 300, "a\0b", "/dev/zero", "../../etc/passwd", "\\\\server\\share\\x", "[" * 50_000, "\ud800")


def test_what_a_browser_remembers_may_be_anything(page):
    for value in STRANGE:
        page.look(**dict.fromkeys(("picture", "run", "lora", "fitted"), value))


def test_what_a_browser_remembers_may_be_of_any_type(page):
    for choice in (None, 5, [], {"picture": 5}, {"run": None}, {"tab": {}}, {"lora": ["x"]}):
        for tab in TABS:
            page.call("tick", choice, None, 48, 0, None, "all", tab)


@pytest.mark.parametrize(
    "what", ["", "null", "5", "[1]", "[0, 99]", "{", "[" * 50_000, '{"edits": 5}', '{"set": "/"}', '{"set": "\\u0000"}']
)
def test_what_a_browser_says_was_done_may_be_anything(data, what):
    from studio.generate import reference_images
    from studio.train import events

    for do in ("move", "remove", "x"):
        assert len(reference_images.changed(["/a", "/b"], do, what, data)) in (1, 2)
    with contextlib.suppress(Trouble):
        assert isinstance(events._meant(what), dict)


# Requests, and an engine that stands still


def test_a_request_that_waits_is_never_answered_by_an_error(page, data, monkeypatch):
    """On an almost full disk the request is kept and drawn, though the form cannot be kept."""
    from studio.generate import events as generate_events

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(generate_events, "keep", full)
    submitted = []
    monkeypatch.setattr(type(page.studio.engine), "submit", lambda self, request: submitted.append(request) or "1")
    function = page.functions["submit"]
    inputs = [getattr(one, "value", None) for one in function.inputs]
    at = next(i for i, one in enumerate(function.inputs) if getattr(one, "elem_id", "") == "set-prompt")
    inputs[at] = "a cat"
    inputs[0] = dict(CHOICES)
    out = page.call("submit", *inputs)
    assert submitted and submitted[0].prompt == "a cat"
    assert "It is being drawn" in str(out) and "No space left" in str(out)


def test_a_worker_that_says_nothing_is_shown_as_stalled():
    job = Job("1", GenerationRequest(), phase="generating", step=11, steps=100)
    now = 1000.0
    quick = EngineSnapshot(state="generating", pid=1, job=job, heard_at=now - STALLED_SECONDS + 1)
    assert not silent_seconds(quick, now) and not engine_status.stalled_words(quick, now)
    slow = EngineSnapshot(state="generating", pid=1, job=job, heard_at=now - STALLED_SECONDS - 1)
    words = engine_status.stalled_words(slow, now)
    assert "stalled" in words and "Cancel twice" in words
    assert "stalled" in engine_status.activity(EngineSnapshot(pid=1, job=job, heard_at=0.001), ())[1]


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_an_engine_that_is_suspended_is_noticed_and_two_cancels_cure_it(data, monkeypatch):
    import psutil

    from backend.host.engine import snapshot as snapshots
    from tests.waiting import wait_for

    monkeypatch.setattr(snapshots, "STALLED_SECONDS", 1.0)
    engine = Engine(data, fake=True)
    try:
        engine.submit(GenerationRequest(num_inference_steps=200, prompt="x"))
        wait_for(lambda: (job := engine.snapshot().job) and job.step > 1)
        psutil.Process(engine.snapshot().pid).suspend()
        wait_for(lambda: silent_seconds(engine.snapshot(), time.monotonic()), seconds=20)
        engine.cancel()
        engine.cancel()
        wait_for(lambda: engine.snapshot().job is None, seconds=20)
    finally:
        engine.stop()


def test_a_worker_says_now_and_then_that_it_is_alive(data, monkeypatch):
    from backend.engine.worker import protocol

    assert protocol.BEAT_SECONDS * 3 < STALLED_SECONDS
    said = []
    one = protocol.Wire.__new__(protocol.Wire)
    one.ended = __import__("threading").Event()
    one.say = lambda event, **_: said.append(event)
    monkeypatch.setattr(protocol, "BEAT_SECONDS", 0.01)
    one.beat()
    time.sleep(0.2)
    one.ended.set()
    assert set(said) == {"alive"}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[" * 200_000, b'{"request": {"loras": 5}}', b'{"request": 5}', b'{"request": {"loras": [5]}}'],
)
def test_a_waiting_request_that_cannot_be_read_is_set_aside(data, content):
    put(data.user / "queue" / "1.json", content)
    pending_requests.save(pending_requests.new(GenerationRequest(prompt="kept")), data.user / "queue")
    assert [item.request.prompt for item in pending_requests.load(data.user / "queue")] == ["kept"]
    assert (data.user / "queue" / "1.bad").is_file()


def test_a_folder_that_is_no_dataset_is_told_in_bounded_time(data, monkeypatch):
    from studio.train import dataset_captions

    monkeypatch.setattr(dataset_captions, "MOST_FILES", 1000)
    began = time.monotonic()
    with pytest.raises(Trouble, match="more in / than a dataset"):
        dataset_captions.pictures_in(Path("/"))
    assert time.monotonic() - began < 10
    assert to_line("x")
