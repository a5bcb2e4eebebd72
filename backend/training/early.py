"""What can be wrong with what a run is given to read, looked for before torch is loaded: whoever mistyped a path is told within a second."""

from __future__ import annotations

from pathlib import Path

from backend.schema.messages import Trouble
from backend.training.captions import lines_of
from backend.training.dataset import read_dataset, read_folder
from backend.training.edits import sample_pictures
from backend.training.extras import EDIT, listed


def look(config, *, index: Path) -> None:
    """Raises Trouble for a dataset that cannot be read. What it finds out of the files is kept in `index`, so that the run need not again."""
    section, task = config.dataset, config.training.task
    if task.endswith(":train"):
        folder = Path(section.dataset_base_path)
        if not section.dataset_base_path or not folder.is_dir():
            raise Trouble(
                "missing_file", f"The folder of encodings {section.dataset_base_path!r} does not exist.",
                hint=f"Make them first: the same command with --task {task.partition(':')[0]}:data_process, and its --output_path here.",
            )  # fmt: skip
    else:
        edits = EDIT in listed(section.extra_inputs)
        read_dataset(section, trigger=section.trigger_word, index=index, edits=edits)
    sample_pictures(config.samples, lines_of(config.samples.sample_prompts))
    if config.prior.regularisation_path:
        read_folder(Path(config.prior.regularisation_path), prior=True)
