"""What can be wrong with what a run is given to read, looked for before torch is loaded: whoever mistyped a path is
told within a second."""

from __future__ import annotations

from pathlib import Path

from backend.dataset.captions import lines_of
from backend.dataset.dataset import Dataset, FileEntry, read_dataset, read_folder
from backend.dataset.reference_images import sample_pictures
from backend.planner.rules.check_training import check_files, file_troubles
from backend.planner.rules.input_rules import EDIT
from backend.schema.messages import Trouble
from backend.schema.training.config import TrainingConfig
from backend.schema.untrusted import is_file, is_folder
from backend.system.text_files import listed


def look(config, *, index: Path) -> Dataset | None:
    """Raises Trouble for a dataset that cannot be read and for files that are not there.

    What it finds out of the pictures is kept in `index`. The dataset, read as the flags alone tell; None where a second
    stage reads none.
    """
    _check_resume(config.output.resume_from_checkpoint)
    check_files(config.lora)
    section, task, data = config.dataset, config.training.task, None
    if task.endswith(":train"):
        folder = Path(section.dataset_base_path)
        if not section.dataset_base_path or not is_folder(folder):
            raise Trouble(
                "missing_file",
                f"The folder of encodings {section.dataset_base_path!r} does not exist.",
                hint=(
                    f"Make them first: the same command with --task {task.partition(':')[0]}:data_process, and "
                    "its --output_path here."
                ),
            )
    else:
        data = read_data(config, index=index, edits=asks_edits(section))
    sample_pictures(config.samples, lines_of(config.samples.sample_prompts))
    return data


def named_troubles(config: TrainingConfig) -> list[Trouble]:
    """What is wrong with the files that a run's settings name besides its dataset: LoRAs, and pictures that samples are
    edited from."""
    found = list(file_troubles(config.lora))
    try:
        sample_pictures(config.samples, lines_of(config.samples.sample_prompts))
    except Trouble as trouble:
        trouble.setting = "sample_edit_images"
        found.append(trouble)
    return found


def asks_edits(section) -> bool:
    """Whether the flags say that samples are edited from pictures; a model that edits has them so anyway."""
    return EDIT in listed(section.extra_inputs)


def read_data(config, *, index: Path | None, edits: bool, sizes_only: dict[str, FileEntry] | None = None) -> Dataset:
    """The dataset, with the pictures that are trained along. `sizes_only`: as for `read_dataset`."""
    data = read_dataset(
        config.dataset, trigger=config.dataset.trigger_word, index=index, edits=edits, sizes_only=sizes_only
    )
    if config.prior.regularisation_path:
        prior = read_folder(Path(config.prior.regularisation_path), prior=True, sizes_only=sizes_only)
        data = Dataset(items=(*data.items, *prior.items), notes=(*data.notes, *prior.notes), broken=data.broken)
    return data


def _check_resume(wanted: str | None) -> None:
    """Raises Trouble where there is nothing to go on from. `latest` is looked for by the run: there may be none yet."""
    if not wanted or wanted == "latest":
        return
    if wanted.endswith(".safetensors"):
        if not is_file(Path(wanted)):
            raise Trouble("missing_file", f"There is no file {wanted} (--resume_from_checkpoint).")
    elif not is_file(Path(wanted) / "state.json"):
        raise Trouble(
            "missing_file",
            f"There is no saved state {wanted} (--resume_from_checkpoint).",
            hint="A state is a folder such as OUTPUT/checkpoints/step-000100; latest is the newest in --output_path.",
        )
