"""Rules of what a run is given to train on: settings whose meaning only some models or tasks have, so that none is
without effect."""

from __future__ import annotations

from collections.abc import Iterator

from backend.catalog.models.supported import check_trains
from backend.planner.rules.case import Case
from backend.schema.messages import Trouble
from backend.system.text_files import listed

EDIT = "edit_image"  # the column of pictures that a sample is edited from
DISTILL = ("seed", "rand_device", "num_inference_steps", "cfg_scale")  # columns that say how a picture was drawn


def model_rules(case: Case) -> Iterator[Trouble]:
    """What the model has not."""
    config, title, frames = case.config, case.sizes.title, case.config.dataset.num_frames
    check_trains(case.family, title=title)
    if frames is not None and frames > 1 and case.family.sizes(case.sizes.variant).frame_compression == 1:
        yield Trouble(
            "bad_value",
            f"{title} makes single pictures, so there are no {frames} frames to train (--num_frames).",
            hint="Leave --num_frames out.",
            setting="num_frames",
        )
    if not case.edits:
        yield from _edits_nothing(case)
    elif config.prior.regularisation_path:
        yield Trouble(
            "bad_value",
            f"The pictures of a plain folder (--regularisation_path) are edited from nothing, and {title} edits.",
            hint="Let the untouched model edit the dataset's with --prior_pictures.",
            setting="regularisation_path",
        )
    dit = case.spec.parts.get("dit") if case.spec else None
    if config.model.zero_cond_t and (
        not case.edits if case.spec is None else dit is not None and not dit.config.get("zero_cond_t")
    ):
        yield Trouble(
            "bad_value",
            f"{title} does not take pictures to edit as free of noise (--zero_cond_t).",
            hint="Leave --zero_cond_t out: what a model needs is read from its files.",
            setting="zero_cond_t",
        )
    for name in listed(config.dataset.extra_inputs):
        if name != EDIT:
            yield from _extra(name, config.training.task, title)


def part_rules(case: Case) -> Iterator[Trouble]:
    """Parts that the run computes with and that are not among the model's files, where those are known."""
    if case.spec is None:
        return
    draws = bool(case.config.samples.sample_prompts.strip())
    encoders = case.family.parts_of("text", case.spec.variant)
    needed = [*encoders, "vae"] if not case.second_stage else ["vae"] if draws else []
    for name in needed:
        if name not in case.spec.parts:
            yield Trouble(
                "missing_part",
                f"The model {case.spec.title} has no {name} here, and this run needs it.",
                hint=f"Name its file too; there are {', '.join(case.spec.parts)}.",
                setting="model_paths",
            )


def _edits_nothing(case: Case) -> Iterator[Trouble]:
    """What only a model that edits can take."""
    config, title = case.config, case.sizes.title
    asks = EDIT in listed(config.dataset.extra_inputs)
    if asks and "dit" not in case.sizes.parts:
        yield Trouble(
            "missing_part",
            f"How the pictures under {EDIT} are to be encoded is told by the model's transformer, which is not among "
            "the files.",
            hint="Name its files too; the first of two stages does not load them.",
            setting="extra_inputs",
        )
    if config.model.processor_path:
        yield Trouble(
            "bad_value",
            f"{title} is trained on text alone here; it has no processor of pictures (--processor_path).",
            hint="Leave --processor_path out; the tokenizer is --tokenizer_path.",
            setting="processor_path",
        )
    if asks:
        yield Trouble(
            "bad_value",
            f"{title} makes pictures of text alone, so it cannot be trained to edit the pictures under {EDIT} "
            "(--extra_inputs).",
            hint=f"{case.family.EDIT_HINT} Or leave --extra_inputs out.",
            setting="extra_inputs",
        )
    if config.samples.sample_edit_images.strip():
        yield Trouble(
            "bad_value",
            f"{title} makes pictures of text alone; its samples are drawn from no others (--sample_edit_images).",
            hint="Leave --sample_edit_images out.",
            setting="sample_edit_images",
        )


def _extra(name: str, task: str, title: str) -> Iterator[Trouble]:
    if name not in DISTILL:
        yield Trouble(
            "not_supported",
            f"{title} cannot be trained with the input {name} here (--extra_inputs).",
            hint=f"What can be taken: {EDIT} by models that edit, and {', '.join(DISTILL)} with --task direct_distill.",
            setting="extra_inputs",
        )
    elif not task.startswith("direct_distill"):
        yield Trouble(
            "bad_value",
            f"The column {name} (--extra_inputs) says how a picture was drawn, which the task {task} does not use.",
            hint="Set --task direct_distill, or leave it out.",
            setting="extra_inputs",
        )


def stage_rules(case: Case) -> Iterator[Trouble]:
    """What a second stage, which has encodings and no pictures, cannot do."""
    if not case.second_stage:
        return
    dataset, samples = case.config.dataset, case.config.samples
    if dataset.masked_loss != "none":
        yield Trouble(
            "bad_value",
            "Masks (--masked_loss) are read from the pictures, which a second stage does not have.",
            hint="Use --task sft, which keeps encodings too.",
            setting="masked_loss",
        )
    if case.edits and samples.sample_prompts.strip() and not samples.sample_edit_images.strip():
        yield Trouble(
            "bad_value",
            "The sample prompts need pictures to edit: a second stage has none of the dataset's.",
            hint="Name them with --sample_edit_images.",
            setting="sample_edit_images",
        )
