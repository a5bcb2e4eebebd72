"""No data becomes code: what lies in a data folder or stands in a file is never imported, and so never run."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from backend.host import lora_tool_process
from backend.host.engine.client import Engine
from backend.host.process import processes
from backend.host.process.isolation import STARTUP, isolated
from backend.host.runs import runs
from backend.schema.allowed_classes import class_of, is_listed
from backend.schema.messages import Trouble
from backend.schema.paths import PROJECT
from backend.schema.settings import from_file_text, from_flags, from_values, to_file_text, to_flags, to_values
from backend.schema.training.config import TrainingConfig
from backend.schema.training.method import OPTIMIZER_PACKAGES
from tests.waiting import wait_for

# Of the standard library, installed, and imported by Python itself.
NAMES = ("torch", "json", "typing", "psutil", "numpy", "gradio", "runpy", "sitecustomize", "usercustomize")
EVIL = "from pathlib import Path\nPath({mark!r}).write_text(__name__)\nraise SystemExit('it was run')\n"


@pytest.fixture
def planted(data):
    """Modules in the data folder that leave a mark where they are run; gives the mark."""
    mark = data.root / "it-was-run"
    for name in NAMES:
        (data.root / f"{name}.py").write_text(EVIL.format(mark=str(mark)))
    for package in ("backend", "studio"):
        (data.root / package).mkdir()
        (data.root / package / "__init__.py").write_text(EVIL.format(mark=str(mark)))
    return mark


SAY = "import json, psutil, typing, backend.schema; print(backend.schema.__file__)"


@pytest.mark.parametrize("words", [["-c", SAY], ["-P", "-c", SAY], ["-m", "backend", "plan", "--help"]])
def test_nothing_in_the_data_folder_or_the_working_folder_is_a_module(planted, data, words):
    env = processes.child_environment(data.root)
    done = subprocess.run([sys.executable, *words], cwd=data.root, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not planted.exists(), done.stderr
    assert str(PROJECT) in done.stdout or "usage" in done.stdout


def test_grandchildren_and_processes_of_multiprocessing_are_as_safe(planted, data):
    script = (
        "import subprocess, sys, multiprocessing\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.get_context('spawn').Process(target=print, args=('spawned',)).run()\n"
        f"    sys.exit(subprocess.run([sys.executable, '-c', {SAY!r}]).returncode)\n"
    )
    env = processes.child_environment(data.root)
    done = subprocess.run([sys.executable, "-c", script], cwd=data.root, env=env, capture_output=True, timeout=60)
    assert done.returncode == 0 and not planted.exists(), done.stderr


def test_where_the_data_folder_is_the_projects_own_nothing_else_in_it_is_a_module(tmp_path):
    """By default pictures and runs lie in Loft's folder: that is on no path, its packages are found by name."""
    env = isolated({}, data=PROJECT)
    assert env["PYTHONPATH"] == str(STARTUP) and env["PYTHONSAFEPATH"] == "1"
    script = "import sys, backend, studio; print([p for p in sys.path if p in sys.argv[1:]])"
    argv = [sys.executable, "-c", script, str(PROJECT), str(tmp_path), str(STARTUP), ""]
    done = subprocess.run(argv, cwd=tmp_path, env={**os.environ, **env}, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_of_pythonpath_stays_what_the_owner_named_in_full(tmp_path):
    data, own = tmp_path / "data", tmp_path / "own"
    inside = data / "cache"
    named = [str(own), "", ".", "relative", str(data), str(inside), str(Path.cwd()), str(PROJECT)]
    env = isolated({"PYTHONPATH": os.pathsep.join(named), "OTHER": "1"}, data=data)
    assert env["PYTHONPATH"].split(os.pathsep) == [str(STARTUP), str(own)] and env["OTHER"] == "1"


def test_a_sitecustomize_of_the_owners_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['SEEN'] = 'yes'")
    env = isolated({**os.environ, "PYTHONPATH": str(tmp_path)}, data=tmp_path / "data")
    argv = [sys.executable, "-c", "import os, backend; print(os.environ.get('SEEN'))"]
    assert subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60).stdout.strip() == "yes"


def test_the_worker_runs_nothing_of_the_data_folder(planted, data):
    engine = Engine(data, fake=True)
    try:
        engine.ensure()
        wait_for(lambda: engine.snapshot().state == "idle", seconds=30)
        argv = engine._argv
        assert argv[:2] == [sys.executable, "-P"]
    finally:
        engine.stop()
    assert not planted.exists()


def test_a_tool_and_the_command_of_a_run_are_begun_safely(planted, data):
    folder = runs.create(TrainingConfig(), data)
    assert runs.command(folder)[:2] == [sys.executable, "-P"]
    assert list(processes.PYTHON) == [sys.executable, "-P"]
    assert "*processes.PYTHON" in Path(lora_tool_process.__file__).read_text(encoding="utf-8")


# Dotted names


@pytest.mark.parametrize(
    "name",
    ["evil.X", "cache.uploads.0a1b.evil.X", "os.system", "torch.optimist.X", "torch.X", "torch.optim..X", "../torch.optim.X",
     "torch.optim/../evil.X", "bitsandbytes.X", "backend.training.X"],
)  # fmt: skip
def test_an_optimizer_of_no_listed_package_is_refused_by_its_name(name):
    for read in (
        lambda: from_values(TrainingConfig, {"customized_optimizer": name}),
        lambda: from_file_text(TrainingConfig, json.dumps({"customized_optimizer": name})),
        lambda: from_flags(TrainingConfig, [f"--customized_optimizer={name}"]),
    ):
        with pytest.raises(Trouble) as caught:
            read()
        if name.rpartition(".")[0]:
            assert caught.value.kind == "not_allowed" and "--allow_custom_code" in caught.value.hint


@pytest.mark.parametrize(
    "name", ["adamw", "lion", "torch.optim.RMSprop", "pytorch_optimizer.Lion", "prodigyopt.Prodigy"]
)
def test_listed_and_short_names_stay(name):
    assert from_values(TrainingConfig, {"customized_optimizer": name}).training.customized_optimizer == name


def test_a_command_line_alone_allows_other_code():
    config = from_flags(TrainingConfig, ["--customized_optimizer", "mine.Best", "--allow_custom_code"])
    assert config.training.allow_custom_code and config.training.customized_optimizer == "mine.Best"
    assert "allow_custom_code" not in to_values(config) and "allow_custom_code" not in to_file_text(config)
    assert not any("allow_custom_code" in flag for flag in to_flags(config))
    for values in ({"allow_custom_code": True}, {"allow_custom_code": "yes", "customized_optimizer": "mine.Best"}):
        with pytest.raises(Trouble, match="no setting called 'allow_custom_code'"):
            from_values(TrainingConfig, values)
    with pytest.raises(Trouble):  # what a file says is of no command line
        from_file_text(TrainingConfig, to_file_text(config))


def test_a_run_whose_settings_name_foreign_code_is_not_started(data):
    section = dataclasses.replace(TrainingConfig().training, customized_optimizer="evil.X", allow_custom_code=True)
    folder = runs.create(dataclasses.replace(TrainingConfig(), training=section), data)
    with pytest.raises(Trouble, match="no package known"):
        runs.start(folder, places=data)


def test_the_list_is_looked_at_before_anything_is_imported():
    imported = []
    with pytest.raises(Trouble, match="no package that may be used"):
        class_of("evil", "X", packages=OPTIMIZER_PACKAGES, load=imported.append)
    assert not imported
    assert is_listed("torch.optim.adam", OPTIMIZER_PACKAGES) and not is_listed("torch.optimal", OPTIMIZER_PACKAGES)


@pytest.mark.torch
def test_networks_come_from_listed_packages_alone(tmp_path, monkeypatch):
    """What is remembered of a model, and questions to the tracing helper, are files."""
    from backend.engine.loading import load
    from backend.engine.tracing import forward_calls, server

    (tmp_path / "evil_network.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass AutoencoderKL: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    for network in (
        "evil_network:X",
        "diffusers:ModelMixin",
        "subprocess:Popen",
        "diffusers.models.modeling_utils:os",
        "",
    ):
        with pytest.raises(Trouble, match=r"no package|no network"):
            load.find_class(network)
        with pytest.raises(Trouble):
            forward_calls.build(network, {}, None)
    (tmp_path / "q.ask").write_text(json.dumps({"network": "evil_network:AutoencoderKL", "config": {}}))
    server.serve(tmp_path, idle_seconds=0.1)
    assert "of no package" in (tmp_path / "q.json").read_text()
    assert not (tmp_path / "ran").exists()


# From metadata to a form

FOREIGN = {  # a stranger's value for whatever could lead to a file, a model, a package or another machine
    "customized_optimizer": "models.evil.m.evil.X", "preset_lora_path": "/evil", "lora_checkpoint": "\\\\evil\\share\\x.safetensors",
    "resume_from_checkpoint": "/evil", "output_path": "/evil", "dataset_base_path": "/evil", "dataset_metadata_path": "/evil",
    "regularisation_path": "/evil", "tokenizer_path": "/evil", "processor_path": "/evil", "model_paths": '["/evil"]', "model": "/evil",
    "model_id_with_origin_paths": "evil/evil:*", "sample_edit_images": "/evil.png", "prior_prompts": "/evil.txt", "sample_prompts": "/evil.txt",
    "quant_options": "dit:evil", "vram": "{}", "optimizer_args": '{"foreach": true}', "enable_wandb_log": True, "wandb_project": "evil",
    "lora_target_modules": "(a+)+$", "data_file_keys": "evil", "extra_inputs": "evil", "devices": 64, "remove_prefix_in_ckpt": "evil",
    "name": "../../evil", "allow_custom_code": True,
}  # fmt: skip


def test_a_loras_metadata_fills_no_path_no_package_and_no_code_into_the_form(tmp_path):
    from backend.catalog.spec import LoraSpec
    from studio.models import config_from_lora

    told = FOREIGN | {"learning_rate": 0.002, "lora_rank": 5, "trigger_word": "zork/zark"}
    nothing = {"family": "", "dialect": "", "ranks": (), "alphas": (), "targets": (), "num_modules": 0}
    metadata = {"software": "Loft 9", "config": json.dumps(told)}
    spec = LoraSpec(path=tmp_path / "m.safetensors", metadata=metadata, **nothing)
    base, defaults = TrainingConfig(), to_values(TrainingConfig())
    values = to_values(config_from_lora.config_of(spec, base))
    assert (values["learning_rate"], values["lora_rank"], values["trigger_word"]) == (0.002, 5, "zork/zark")
    changed = {name for name in FOREIGN if name in values and values[name] != defaults[name]}
    assert changed <= {"name"} and "evil" not in values["name"]
    assert "evil" not in json.dumps(config_from_lora.settings_of(spec))


def test_every_setting_that_may_be_taken_is_one_and_names_no_file():
    from backend.schema.settings import knobs_of
    from studio.models import config_from_lora

    known = {item.name for item in knobs_of(TrainingConfig)}
    assert set(config_from_lora.TAKEN) <= known
    assert not [
        name
        for name in config_from_lora.TAKEN
        if "path" in name or "file" in name or ("model" in name and name != "lora_target_modules")
    ]
