"""The client against real workers: `backend.engine --fake`, and small scripts for what that one never does."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from backend.host.engine import pending_requests
from backend.host.engine.client import Engine
from backend.schema.messages import Trouble
from backend.schema.request import GenerationRequest, LoraUse
from tests.waiting import wait_for

SHORT = GenerationRequest(prompt="a hill", num_inference_steps=4, width=64, height=64)
LONG = dataclasses.replace(SHORT, num_inference_steps=200)


@pytest.fixture
def make(data):
    """Engines on the data folder, all ended with the test."""
    made = []

    def engine(**more) -> Engine:
        made.append(Engine(data, **({"fake": True} | more)))
        return made[-1]

    yield engine
    for each in made:
        each.stop()


def answered(engine: Engine, id: str):
    return wait_for(lambda: next((item for item in engine.snapshot().answers if item.id == id), None))


def running(engine: Engine):
    return wait_for(lambda: (job := engine.snapshot().job) and job.step > 1 and job)


def script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "worker.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def test_a_picture_from_nothing(make, data):
    engine = make()
    assert engine.snapshot().state == "off"
    answer = answered(engine, engine.submit(dataclasses.replace(SHORT, count=2, seed=7)))
    assert answer.trouble is None and not answer.cancelled
    assert answer.result.seeds == (7, 8)
    assert all(Path(path).is_file() and data.outputs in Path(path).parents for path in answer.result.pictures)
    snapshot = engine.snapshot()
    assert (snapshot.state, snapshot.device, snapshot.job, snapshot.queue) == ("idle", "cpu", None, ())
    assert list((data.user / "queue").glob("*.json")) == []


def test_progress_is_seen_and_a_snapshot_never_changes(make):
    engine = make()
    engine.submit(LONG)
    job = running(engine)
    before = engine.snapshot()
    assert job.phase == "generating" and job.steps == 200 and job.seconds_left > 0
    preview = wait_for(lambda: engine.snapshot().job.preview)
    assert Path(preview).is_file()
    assert engine.snapshot().revision > before.revision and before.job.step <= engine.snapshot().job.step
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.state = "idle"


def test_requests_are_answered_in_order_by_one_worker(make):
    engine = make()
    ids = [engine.submit(dataclasses.replace(SHORT, seed=seed)) for seed in range(4)]
    pids = {engine.snapshot().pid for id in ids if answered(engine, id)} - {0}
    assert [answer.id for answer in engine.snapshot().answers] == ids
    assert len(pids) == 1


def test_cancel_is_soft_first(make):
    engine = make()
    id = engine.submit(LONG)
    running(engine)
    pid = engine.snapshot().pid
    engine.cancel(id)
    assert answered(engine, id).cancelled
    assert engine.snapshot().pid == pid and psutil.pid_exists(pid)
    assert engine.snapshot().trouble is None
    assert answered(engine, engine.submit(SHORT)).result


def test_a_waiting_request_is_taken_off_the_queue(make, data):
    engine = make()
    first, second, third = engine.submit(LONG), engine.submit(SHORT), engine.submit(SHORT)
    running(engine)
    engine.cancel(second)
    assert [item.id for item in engine.snapshot().queue] == [third]
    assert not (data.user / "queue" / f"{second}.json").exists()
    engine.cancel(first)
    assert answered(engine, third).result


DEAF = """
import sys, time, json
print(json.dumps({"event": "ready", "device": "cpu", "name": "deaf"}), flush=True)
for line in sys.stdin:
    id = json.loads(line)["id"]
    print(json.dumps({"event": "loading", "id": id, "part": "dit", "done_bytes": 1, "total_bytes": 9}), flush=True)
    time.sleep(60)
"""


def test_a_second_cancel_ends_a_worker_that_does_not_listen(make, tmp_path):
    engine = make(argv=script(tmp_path, DEAF))
    id = engine.submit(SHORT)
    job = wait_for(lambda: (job := engine.snapshot().job) and job.part and job)
    assert (job.phase, job.part, job.done_bytes, job.total_bytes) == ("loading", "dit", 1, 9)
    pid = engine.snapshot().pid
    engine.cancel(id)
    time.sleep(0.2)
    assert engine.snapshot().state == "cancelling"
    engine.cancel(id)
    assert answered(engine, id).cancelled
    assert engine.snapshot().state == "off" and engine.snapshot().trouble is None
    wait_for(lambda: not psutil.pid_exists(pid))


def test_a_worker_killed_in_a_picture_is_one_sentence_and_the_next_request_gets_a_new_one(make):
    engine = make()
    id = engine.submit(LONG)
    running(engine)
    pid = engine.snapshot().pid
    psutil.Process(pid).kill()
    trouble = answered(engine, id).trouble
    assert trouble.kind == "worker_died"
    assert "while it made the picture" in trouble.message and "The next request starts a new one." in trouble.hint
    assert engine.snapshot().trouble is trouble
    assert answered(engine, engine.submit(SHORT)).result
    assert engine.snapshot().trouble is None and engine.snapshot().pid not in (0, pid)


def test_what_waits_goes_on_after_a_worker_died(make):
    engine = make()
    first, second = engine.submit(LONG), engine.submit(SHORT)
    running(engine)
    psutil.Process(engine.snapshot().pid).kill()
    assert answered(engine, first).trouble and answered(engine, second).result


def test_a_worker_that_cannot_start_is_not_started_over_and_over(make, tmp_path, data):
    argv = script(
        tmp_path, f"import sys; open({str(tmp_path / 'starts')!r}, 'a').write('x'); sys.exit('no such library')"
    )
    engine = make(argv=argv)
    ids = [engine.submit(SHORT) for _ in range(3)]
    trouble = wait_for(lambda: engine.snapshot().trouble)
    assert "could not start: its process ended with exit code 1" in trouble.message
    assert "no such library" in trouble.detail
    time.sleep(0.5)
    assert (tmp_path / "starts").read_text() == "x"
    assert [item.held for item in engine.snapshot().queue] == [True] * (3 - len(engine.snapshot().answers))
    assert {item.id for item in engine.snapshot().queue} | {item.id for item in engine.snapshot().answers} == set(ids)


def test_a_program_that_is_not_there(make, tmp_path):
    engine = make(argv=[str(tmp_path / "absent")])
    engine.submit(SHORT)
    trouble = wait_for(lambda: engine.snapshot().trouble)
    assert trouble.kind == "not_started" and engine.snapshot().queue[0].held


def test_a_request_that_is_refused_is_its_answer_and_stays_until_it_is_dismissed(make):
    engine = make()
    broken = dataclasses.replace(SHORT, model="nobody/nothing", width=0)  # as a broken file would bring it
    id = engine.submit(broken)
    answer = answered(engine, id)
    assert answer.trouble.kind == "bad_value" and "width" in answer.trouble.message.lower()
    assert engine.snapshot().state == "idle"
    assert answered(engine, engine.submit(SHORT)).result
    assert engine.snapshot().failed == (answer,) and engine.snapshot().trouble is None
    again = answered(engine, engine.try_again(id))
    assert again.request == broken and engine.snapshot().failed == (again,), (
        "tried again, it stands for the earlier one"
    )
    assert engine.try_again(id) == ""


def test_waiting_requests_come_back_held_after_a_restart(make, data):
    request = dataclasses.replace(SHORT, loras=(LoraUse("my.safetensors", 0.5),), prompt="Käse")
    first = make()
    at_work = first.submit(LONG)
    running(first)
    waits = first.submit(request)
    pid = first.snapshot().pid
    first.stop()
    assert not psutil.pid_exists(pid)
    second = make()
    assert [(item.id, item.held, item.request) for item in second.snapshot().queue] == [
        (at_work, True, LONG),
        (waits, True, request),
    ]
    time.sleep(0.3)
    assert second.snapshot().state == "off"
    second.cancel(at_work)
    second.release(waits)
    assert answered(second, waits).result
    assert [path.name for path in (data.user / "queue").iterdir()] == []


def test_a_broken_file_in_the_queue_is_set_aside(make, data):
    waiting = pending_requests.new(SHORT)
    pending_requests.save(waiting, data.user / "queue")
    for name, text in {"0a": "{", "0b": "[]", "0c": '{"request": {"nonsense": 1}}'}.items():
        (data.user / "queue" / f"{name}.json").write_text(text)
    assert [item.id for item in make().snapshot().queue] == [waiting.id]
    assert sorted(path.suffix for path in (data.user / "queue").iterdir()) == [".bad", ".bad", ".bad", ".json"]


def test_nothing_begins_while_another_has_the_card(make):
    taken = ["The run red-cat is using the card."]
    engine = make(busy=lambda: taken[0])
    id = engine.submit(SHORT)
    wait_for(lambda: engine.snapshot().waits_for == taken[0])
    assert engine.snapshot().state == "off"
    with pytest.raises(Trouble, match="red-cat"):
        engine.ensure()
    taken[0] = ""
    assert answered(engine, id).result
    assert engine.snapshot().waits_for == ""


def test_whoever_takes_the_card_gets_it_and_the_picture_is_made_afterwards(make):
    engine = make()
    id = engine.submit(dataclasses.replace(LONG, num_inference_steps=20))
    running(engine)
    pid = engine.snapshot().pid
    with engine.card_given():
        assert not psutil.pid_exists(pid)
        time.sleep(0.3)
        assert engine.snapshot().state == "off"
        assert [(item.id, item.held) for item in engine.snapshot().queue] == [(id, False)]
    assert answered(engine, id).result


def test_other_commands_are_answered(make):
    engine = make()
    events = engine.ask("load", model="loft/starter")
    assert [event.event for event in events] == ["loading", "loading", "loading", "loaded"]
    with pytest.raises(Trouble, match="no tools"):
        engine.ask("tool", name="merge")


def test_a_command_whose_worker_dies_does_not_wait(make, tmp_path):
    engine = make(argv=script(tmp_path, DEAF.replace("time.sleep(60)", "sys.exit(3)")))
    began = time.monotonic()
    with pytest.raises(Trouble, match="ended while it was asked to load"):
        engine.ask("load", model="loft/starter", timeout_seconds=30)
    assert time.monotonic() - began < 10


def test_a_worker_that_a_killed_studio_left_is_ended(make, data, tmp_path):
    engine = make(argv=script(tmp_path, DEAF.replace("sys.stdin", "iter(input, None)").replace("import", "import", 1)))
    engine.ensure()
    pid = wait_for(lambda: engine.snapshot().pid)
    wait_for(lambda: engine.snapshot().state == "idle")
    make()
    wait_for(lambda: not psutil.pid_exists(pid))


def test_stray_output_does_no_harm(make, tmp_path):
    noisy = DEAF.replace("for line", "print('Loading weights 12%'); print('{\"x\": 1}'); print('\\xff')\nfor line", 1)
    engine = make(argv=script(tmp_path, noisy))
    engine.ensure()
    wait_for(lambda: engine.snapshot().state == "idle")
    assert engine.snapshot().device_name == "deaf"


def test_the_workers_words_go_to_the_log(make, data, tmp_path):
    engine = make(argv=script(tmp_path, "import sys; print('warning: old driver', file=sys.stderr)\n" + DEAF))
    engine.ensure()
    wait_for(lambda: engine.snapshot().state == "idle")
    assert "warning: old driver" in (data.user / "engine.log").read_text()
    known = json.loads((data.user / "worker.json").read_text())
    assert known["pid"] == engine.snapshot().pid != os.getpid()
