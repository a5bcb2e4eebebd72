"""One process of a run: `python -m backend.training RUN_FOLDER`, or `accelerate launch -m backend.training --flags`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from backend.dataset import check_inputs
from backend.engine.devices import allocator_limits
from backend.schema.json_values import parse_json
from backend.schema.messages import Trouble
from backend.schema.paths import places
from backend.schema.settings import from_file_text, from_flags, from_values, to_file_text
from backend.schema.training.config import TrainingConfig, TrainingSection
from backend.schema.untrusted import exists, is_file, is_folder, read_bytes, read_object
from backend.training.checkpoint.reporter import Reporter
from backend.training.checkpoint.set_aside import (
    files_named,
    made_something,
    put_back,
    set_aside,
    set_results_aside,
    starts_fresh,
    told,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

    from backend.dataset.dataset import Dataset

OBJECTIVE = ("timestep_sampling", "loss_weighting", "max_grad_norm")


def main(argv: list[str]) -> int:
    """Exit status: 0 for a run that ended as it should, 2 for one that a sentence explains, 1 for a fault of ours."""
    try:
        config, folder = read_arguments(argv)
    except Trouble as trouble:
        if _names_folder(argv) and is_folder(Path(argv[0])):
            Reporter(Path(argv[0])).trouble(trouble)
        else:
            print(str(trouble), file=sys.stderr)
        return _leave(2, str(trouble))
    return run_in(config, folder, by_flags=not _names_folder(argv), argv=argv)


def _names_folder(argv: list[str]) -> bool:
    return bool(argv) and not argv[0].startswith("-")


def read_arguments(argv: list[str]) -> tuple[TrainingConfig, Path]:
    """The settings and the run's folder. Flags after a folder override its `config.json`."""
    if not _names_folder(argv):
        config = from_flags(TrainingConfig, argv, program="python -m backend.training")
        return config, Path(config.output.output_path)
    folder = Path(argv[0])
    file = folder / "config.json"
    if not is_file(file):
        raise Trouble(
            "missing_file", f"There is no run in {folder}: it holds no config.json.", hint="Give a run's folder."
        )
    text = read_bytes(file).decode("utf-8", errors="replace")
    given = from_flags(TrainingConfig, argv[1:])
    base = TrainingConfig(training=TrainingSection(allow_custom_code=given.training.allow_custom_code))
    config = _keep_objective(from_file_text(TrainingConfig, text, base=base), text, folder)
    if len(argv) > 1:
        from backend.schema.settings import to_values

        defaults = to_values(TrainingConfig())
        changed = {name: value for name, value in to_values(given).items() if value != defaults[name]}
        config = from_values(TrainingConfig, changed, base=config)
    if config.output.output_path == TrainingConfig().output.output_path:
        config = _with_output(config, output_path=str(folder))
    if not config.output.resume_from_checkpoint and any((folder / "checkpoints").glob("step-*/state.json")):
        config = _with_output(config, resume_from_checkpoint="latest")
    return config, folder


def _keep_objective(config: TrainingConfig, text: str, folder: Path) -> TrainingConfig:
    """`config` with the objective that the run's newest state was made with, where its settings (`text`) say nothing of
    it: files hold what differs from the defaults, and the defaults of an earlier version were others."""
    states = sorted((folder / "checkpoints").glob("step-*/state.json"))
    if not states:
        return config
    try:
        then = read_object(states[-1])["facts"]["config"]
        then, said = dict(then), parse_json(text)
    except (Trouble, ValueError, KeyError, TypeError):
        return config  # a damaged state is told of when it is loaded
    silent = [name for name in OBJECTIVE if name in then and isinstance(said, dict) and name not in said]
    return from_values(TrainingConfig, {name: then[name] for name in silent}, base=config)


def _with_output(config: TrainingConfig, **changes) -> TrainingConfig:
    return dataclasses.replace(config, output=dataclasses.replace(config.output, **changes))


def run_in(config: TrainingConfig, folder: Path, *, by_flags: bool, argv: list[str]) -> int:
    """Trains in `folder`; the exit status. After running out of memory the process restarts itself with the next
    memory fallback."""
    # Threads that spin while they wait halve the speed of a busy machine; torch, loaded below, reads this once.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    allocator_limits.expand_segments()
    rank = int(os.environ.get("RANK", "0"))
    aside: dict[Path, Path] = {}
    if rank == 0:
        try:
            aside = _claim_folder(config, folder, by_flags=by_flags, argv=argv)
        except Trouble as trouble:  # the folder cannot be written or its events are another run's: nothing is put there
            print(str(trouble), file=sys.stderr, flush=True)
            return _leave(2, str(trouble))
    reporter = Reporter(folder, silent=rank != 0, table=config.output.enable_csv_log)
    if aside:
        reporter.note(told(aside))
    try:
        reason = _train(config, folder, reporter)
    except Trouble as trouble:
        reporter.trouble(trouble)
        put_back(aside, unless=made_something(folder))
        return _leave(2, str(trouble))
    except Exception as error:
        traceback.print_exc()
        if _is_out_of_memory(error):
            from backend.training.run import oom_restart

            oom_restart.restart_with_fallback(config, argv, reporter)
            trouble = oom_restart.out_of_memory(config, reporter.now)
            reporter.trouble(trouble)
            return _leave(2, str(trouble))
        what = f"{type(error).__name__}: {error}"
        said = f"The run ended by a fault: {what[:500]}."
        reporter.trouble(Trouble("fault", said, detail=traceback.format_exc()))
        put_back(aside, unless=made_something(folder))
        return _leave(1, said)
    reporter.say({"complete": "Complete.", "stopped": "Stopped; everything is saved."}[reason])
    return 0


def _is_out_of_memory(error: Exception) -> bool:
    from backend.engine.devices import out_of_memory

    return out_of_memory.is_oom(error)


def _leave(status: int, sentence: str) -> int:
    """Ends a failed process of several at once: the others wait for it in a collective call and are ended by the
    launcher."""
    _report_to_launcher(sentence)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _report_to_launcher(sentence: str) -> None:
    """Writes what ended this process where torch's launcher looks for it: its report closes with that sentence (torch's
    notes on errors of `torch.distributed.elastic`)."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        message = {"message": sentence, "extraInfo": {"py_callstack": sentence, "timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):  # its report is then without it
            Path(file).write_text(json.dumps({"message": message}), encoding="utf-8")


def _claim_folder(config: TrainingConfig, folder: Path, *, by_flags: bool, argv: list[str]) -> dict[Path, Path]:
    """`_make_folder`, or a Trouble about a folder that cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _make_folder(config, folder, by_flags=by_flags, argv=argv)
    except OSError as error:
        words = f"The output folder {folder} cannot be written ({error.strerror or error})."
        raise Trouble("not_writable", words, hint="Choose another with --output_path.") from None


def _refuse_second(folder: Path) -> None:
    """Raises Trouble where another process still trains in `folder`: each would write over what the other saves."""
    from backend.system import process_record

    known = process_record.read_record(folder / process_record.RECORD)
    if known is None or not process_record.alive(other := known[0]):
        return
    # A run that starts again after OOM, with less memory, keeps its process, and its launcher.
    if other.pid not in (os.getpid(), os.getppid()):
        raise Trouble(
            "in_use",
            f"Another run (process {other.pid}) is at work in {folder}.",
            hint="Choose another --output_path, or stop that run first: put a file called stop into its folder.",
        )


def _make_folder(config: TrainingConfig, folder: Path, *, by_flags: bool, argv: list[str]) -> dict[Path, Path]:
    """Writes what is known of the run; what was set aside for it."""
    from backend.system.atomic_files import write_text

    if os.environ.get("LOFT_MARK"):  # the studio has started this and keeps the record itself
        return _set_results_aside(config, folder)
    _refuse_second(folder)
    aside: dict[Path, Path] = {}
    if by_flags:
        if starts_fresh(config, folder):
            aside = set_aside(folder, named=files_named(config))
        write_text(folder / "config.json", to_file_text(config), durable=True)
    (folder / "stop").unlink(missing_ok=True)
    _write_process_record(argv, folder)
    return aside or _set_results_aside(config, folder)


def _set_results_aside(config: TrainingConfig, folder: Path) -> dict[Path, Path]:
    """Of a run without a state to go on from: another run's results that lie where its own are to go."""
    return (
        set_results_aside(Path(config.output.output_path), named=files_named(config))
        if not any((folder / "checkpoints").glob("step-*/state.json"))
        else {}
    )


def _write_process_record(argv: list[str], folder: Path) -> None:
    """Writes this run's process.json. `events_at`: where the event log ends now; what stands before is of an earlier
    process."""
    from backend.system import process_record

    # Of several processes the launcher, their parent, is the one to watch and to end.
    pid = os.getppid() if "RANK" in os.environ else os.getpid()
    process = process_record.identify(pid, [sys.executable, "-m", "backend.training", *argv])
    events = folder / "events.jsonl"
    events_at = events.stat().st_size if exists(events) else 0
    process_record.write_record(folder / process_record.RECORD, process, events_at=events_at)


def _train(config: TrainingConfig, folder: Path, reporter: Reporter) -> str:
    """Sets a run up and trains; why it ended ("complete" or "stopped"). Torch is imported here, after the inputs were
    checked."""
    index = places().cache / "pictures.json"
    data = check_inputs.look(config, index=index)

    if config.training.deterministic:  # read by cuBLAS when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    import torch
    from accelerate import Accelerator, DistributedDataParallelKwargs

    from backend.schema.settings import to_values
    from backend.training.checkpoint.reporter import add_trackers
    from backend.training.dry_run import preflight
    from backend.training.loop import run_length, train
    from backend.training.model import fsdp
    from backend.training.model.apply_plan import apply_plan
    from backend.training.setup import set_up

    _set_deterministic(config.training.deterministic)
    config, spread = fsdp.read_launcher_environment(config)
    accelerator = Accelerator(
        # Said outright, for several processes on a CPU find each other only so
        cpu=not torch.accelerator.is_available()
        or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"),
        mixed_precision="no" if fsdp.asked() else config.training.mixed_precision,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=config.training.find_unused_parameters)],
    )
    assert accelerator.num_processes == int(os.environ.get("WORLD_SIZE", "1")), (
        "the processes do not know of each other"
    )
    if accelerator.is_main_process:
        if spread:
            reporter.note(spread)
        add_trackers(reporter, config.output, config=to_values(config))
    config = apply_plan(config, accelerator, reporter)
    if config.training.task.endswith(":data_process"):
        return _process_data(config, accelerator, reporter, index, data)
    run = set_up(config, folder, Path(config.output.output_path), accelerator, reporter, index=index, known=data)
    pace = run_length(run)
    reporter.event(
        "started",
        total_steps=pace.total,
        epochs=pace.total // pace.per_epoch,
        model=run.base.spec.title,
        parts=sorted({name.partition(".")[0] for name in run.weights}),
        pid=os.getpid(),
    )
    reporter.now = "training"  # everything is there
    if config.output.preflight:
        preflight(run)
    reason = train(run)
    reporter.event("finished", step=_last_step(folder), reason=reason)
    accelerator.end_training()
    return reason


def _set_deterministic(wanted: bool) -> None:
    """Has torch take only deterministic algorithms, or any again. Of attention's fused kernels that leaves flash
    attention, which has a deterministic backward pass; memory-efficient attention and cuDNN's add up gradients in any
    order (torch's notes on reproducibility)."""
    import torch

    torch.use_deterministic_algorithms(wanted)
    torch.backends.cuda.enable_mem_efficient_sdp(not wanted)
    torch.backends.cuda.enable_cudnn_sdp(not wanted)


def _process_data(
    config: TrainingConfig, accelerator: Accelerator, reporter: Reporter, index: Path, data: Dataset | None
) -> str:
    """The first of two stages: everything that needs no gradient is computed and stored in `output_path`."""
    from backend.training.encoding import encoded_dataset
    from backend.training.setup import make_loader, make_source

    output = Path(config.output.output_path)
    load = make_loader(config, accelerator, reporter.folder)
    source = make_source(config, load, accelerator, reporter, index=index, known=data, into=output)
    if accelerator.is_main_process:
        encoded_dataset.write(output, source, load.base)
        reporter.event("saved", path=str(output / encoded_dataset.TABLE), step=0)
        reporter.event("finished", step=0, reason="complete")
    accelerator.end_training()
    return "complete"


def _last_step(folder: Path) -> int:
    from backend.training.checkpoint.state import list_states, step_of

    states = list_states(folder)
    return step_of(states[-1]) if states else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
