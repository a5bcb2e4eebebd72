"""What a training run leaves and shows on the way: results, states, loggers, samples, validation."""

from __future__ import annotations

from dataclasses import dataclass

from backend.schema.settings import knob


@dataclass(frozen=True)
class OutputSection:
    name: str = knob("lora", help="Name of the run; it is written into the files it makes.")
    output_path: str = knob("./models", help="Folder for the results and for the run's own files.", level="advanced")
    remove_prefix_in_ckpt: str = knob(
        "pipe.dit.",
        help="Cut from the beginning of the names in the saved files, which are `pipe.PART.NAME` in full.",
        level="advanced",
        label="Remove prefix",
    )
    save_steps: int | None = knob(
        None, help="Save every so many steps; without it, after every epoch.", low=1, high=10**9
    )
    keep_checkpoints: int = knob(
        2, help="Full states kept, the newest; results are all kept.", low=1, high=1000, level="advanced"
    )
    keep_every: int | None = knob(
        None, help="Full states of every so many steps are kept too.", low=1, high=10**9, level="advanced"
    )
    resume_from_checkpoint: str | None = knob(
        None,
        help="`latest`, a full state's folder, or a safetensors file of weights to begin from.",
        level="advanced",
    )
    save_dtype: str = knob(
        "bfloat16",
        help="Number format of the saved files.",
        choices=("bfloat16", "float16", "float32"),
        level="advanced",
    )
    preflight: bool = knob(
        False,
        help="First try one step at the largest size, one sample and one save, and say how much memory each took.",
        level="advanced",
    )
    enable_csv_log: bool = knob(True, help="Write loss.csv.", level="advanced")
    enable_tensorboard_log: bool = knob(False, help="Write TensorBoard's files.", level="advanced")
    enable_wandb_log: bool = knob(False, help="Report to Weights & Biases.", level="advanced")
    wandb_project: str = knob("loft", help="Project there.", level="advanced")
    enable_swanlab_log: bool = knob(False, help="Report to SwanLab.", level="advanced")
    swanlab_project: str = knob("loft", help="Project there.", level="advanced")


@dataclass(frozen=True)
class SampleSection:
    sample_prompts: str = knob(
        "", help="Pictures drawn while training, one prompt per line, or a text file of such lines.", lines=3
    )
    sample_edit_images: str = knob(
        "",
        help="For models that edit: the picture that each sample prompt begins from, one line for each prompt or "
        "one for all (or a text file of such "
        "lines); several in a line with commas between. Empty: the dataset's, in turn.",
        lines=2,
        level="advanced",
    )
    sample_every: int | None = knob(
        None,
        help="Draw them every so many steps; without it, whenever a result is saved.",
        low=1,
        high=10**9,
        unit="steps",
    )
    sample_inference_steps: int = knob(12, help="Denoising steps.", low=1, high=200, level="advanced")
    sample_guidance: float = knob(3.0, help="Guidance.", low=1.0, high=20.0, level="advanced")
    sample_seed: int = knob(
        0, help="Seed of the first; the next ones count up.", low=0, high=2**53 - 1, level="advanced"
    )
    sample_strengths: str = knob(
        "1", help="Strengths of the LoRA at which each is drawn, comma-separated: `0.5,1`.", level="advanced"
    )
    sample_width: int | None = knob(
        None, help="Width; by default the training size.", low=16, high=8192, unit="px", level="advanced"
    )
    sample_height: int | None = knob(
        None, help="Height; by default the training size.", low=16, high=8192, unit="px", level="advanced"
    )
    validation_split: float = knob(
        0.0, help="Share of the pictures kept aside to measure the loss on.", low=0.0, high=0.9, level="advanced"
    )
    validation_every: int = knob(100, help="How often.", low=1, high=10**9, unit="steps", level="advanced")
