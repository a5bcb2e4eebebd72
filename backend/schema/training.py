"""Everything that a training run can be told. Names, meanings and defaults of DiffSynth-Studio where it has the setting."""

from __future__ import annotations

from dataclasses import dataclass

from backend.schema.knobs import knob, section

TASKS = (
    "sft",
    "sft:data_process",
    "sft:train",
    "direct_distill",
    "direct_distill:data_process",
    "direct_distill:train",
)
SCHEDULES = ("constant", "linear", "linear_from_half", "cosine", "cosine_with_restarts")
ADAPTERS = ("lora", "dora", "rslora", "loha", "lokr")


@dataclass(frozen=True)
class ModelSection:
    model: str = knob(
        "loft/starter",
        help="Base model: an id, a folder or a file. Not used where `model_paths` or `model_id_with_origin_paths` say it.",
    )
    model_paths: str | None = knob(
        None, help="Model files as a JSON list; shards of one part as a list inside it.", level="advanced", lines=2
    )
    model_id_with_origin_paths: str | None = knob(
        None, help="Model files as `id:pattern`, comma-separated.", level="advanced", lines=2
    )
    tokenizer_path: str | None = knob(
        None, help="Tokenizer as `id:pattern` or a folder; by default the one beside the model.", level="advanced"
    )
    fp8_models: str | None = knob(
        None,
        help="Frozen parts to keep in FP8, comma-separated: entries as in `model_paths` or `model_id_with_origin_paths`.",
        label="FP8 models",
        level="advanced",
    )
    offload_models: str | None = knob(
        None,
        help="Frozen parts to keep in RAM and fetch block by block, comma-separated: entries as for `fp8_models`.",
        level="advanced",
    )
    initialize_model_on_cpu: bool = knob(
        False,
        help="Load every part in RAM first and move it to the card when it is needed.",
        label="Load in RAM first",
        level="advanced",
    )


@dataclass(frozen=True)
class DatasetSection:
    dataset_base_path: str = knob(
        "", help="Folder of the pictures. Several, comma-separated, are trained together.", label="Dataset folder"
    )
    dataset_metadata_path: str | None = knob(
        None,
        help="csv, json or jsonl file with columns `image` and `prompt` (json: a prompt may be a list, one is drawn each "
        "time). Without it each picture's caption is the .txt file of the same name. Several, comma-separated.",
        label="Metadata file",
    )
    dataset_repeat: int = knob(1, help="How often an epoch goes through the dataset.", low=1, high=100000)
    dataset_weights: str | None = knob(
        None, help="How much each of several dataset folders counts, comma-separated numbers.", level="advanced"
    )
    dataset_num_workers: int = knob(
        0,
        help="Threads that read and prepare pictures while encodings are made; 0 is one.",
        low=0,
        high=64,
        level="advanced",
    )
    data_file_keys: tuple[str, ...] = knob(
        ("image",), help="Metadata columns that name files; the first one present is the picture.", level="advanced"
    )
    height: int | None = knob(
        None, help="Fixed height; without it sizes follow the pictures.", low=16, high=8192, unit="px"
    )
    width: int | None = knob(
        None, help="Fixed width; without it sizes follow the pictures.", low=16, high=8192, unit="px"
    )
    max_pixels: int = knob(
        1024 * 1024,
        help="Pictures with more pixels are made smaller, their proportions kept.",
        low=256,
        high=2**26,
        unit="px",
    )
    trigger_word: str = knob("", help="Put before every caption that does not hold it yet.")
    caption_dropout: float = knob(
        0.0, help="Share of samples trained with an empty caption.", low=0.0, high=1.0, step=0.05
    )
    caption_shuffle: bool = knob(
        False,
        help="Shuffle the comma-separated pieces of a caption each time, the first kept in place.",
        level="advanced",
    )
    flip: bool = knob(False, help="Show every picture mirrored half of the time.", level="advanced")
    masked_loss: str = knob(
        "none",
        help="Learn only where a mask is white: from the picture's alpha channel, or from `NAME.mask.png` beside it.",
        choices=("none", "alpha", "file"),
        level="advanced",
    )
    mask_floor: float = knob(
        0.1, help="How much the loss outside the mask still counts.", low=0.0, high=1.0, level="advanced"
    )
    skip_broken_pictures: bool = knob(
        False, help="Leave out pictures that cannot be read, and say which, instead of stopping.", level="advanced"
    )
    data_cache: bool = knob(
        True,
        help="Keep encodings that cannot change on disk, shared between runs. Off: they are computed for this run alone.",
        level="advanced",
    )
    data_cache_gib: float = knob(
        20.0,
        help="The oldest cached encodings are deleted above this size.",
        low=0.1,
        unit="GiB",
        label="Cache limit",
        level="advanced",
    )


@dataclass(frozen=True)
class PriorSection:
    prior_pictures: int = knob(
        0,
        help="So many pictures drawn by the untouched model are trained along, so that it keeps what it knows. 0: none.",
        low=0,
        high=10000,
    )
    prior_prompts: str = knob(
        "",
        help="What they show, one prompt per line, or a text file of such lines. Empty: a list of everyday things.",
        lines=3,
    )
    prior_weight: float = knob(1.0, help="How much their loss counts against the dataset's.", low=0.0, high=100.0)
    prior_share: float = knob(
        0.5, help="Share of the samples that are such pictures.", low=0.05, high=0.95, level="advanced"
    )
    prior_guidance: float = knob(2.5, help="Guidance with which they are drawn.", low=1.0, high=20.0, level="advanced")
    regularisation_path: str | None = knob(
        None, help="A folder of captioned pictures to use in their place.", level="advanced"
    )


@dataclass(frozen=True)
class TrainingSection:
    task: str = knob(
        "sft",
        help="What is learnt. `:data_process` computes and stores what needs no gradient, `:train` trains from that.",
        choices=TASKS,
        level="advanced",
    )
    learning_rate: float = knob(1e-4, help="How large each step is. 1e-4 suits a LoRA of a large model.", low=0.0, high=10.0)
    learning_rates: str | None = knob(
        None, help="Learning rates of single parts: `text_encoder=2e-5`, comma-separated.", level="advanced"
    )
    num_epochs: int = knob(1, help="How often all pictures, with their repeats, are seen.", low=1, high=10**6)
    max_steps: int | None = knob(
        None, help="End after so many optimizer steps; epochs are then as many as that takes.", low=1, high=10**9
    )
    batch_size: int = knob(
        1, help="Pictures of equal size that go through the network together, per device.", low=1, high=4096
    )
    gradient_accumulation_steps: int = knob(
        1, help="Batches whose gradients are summed to one optimizer step.", low=1, high=4096
    )
    trainable_models: str | None = knob(
        None, help="Parts whose own weights train, comma-separated: `dit,text_encoder`.", level="advanced"
    )
    customized_optimizer: str = knob(
        "adamw",
        help="adamw, adam, sgd, adafactor, lion, muon (block matrices; AdamW for the rest), adamw8bit, prodigy, or a class by "
        "its dotted name such as `torch.optim.RMSprop`.",
        label="Optimizer",
        level="advanced",
    )
    optimizer_args: str | None = knob(
        None, help='More arguments of the optimizer as JSON: `{"betas": [0.9, 0.99]}`.', level="advanced"
    )
    weight_decay: float = knob(0.01, help="Weight decay.", low=0.0, high=10.0, level="advanced")
    lr_scheduler: str = knob(
        "constant",
        help="How the learning rate goes on after the warm-up. linear_from_half: constant to the middle, then down to 0.",
        choices=SCHEDULES,
        label="Schedule",
        level="advanced",
    )
    lr_warmup_steps: int = knob(
        0, help="Steps over which it rises from 0.", low=0, high=10**6, label="Warm-up", level="advanced"
    )
    lr_restarts: int = knob(1, help="Cycles of cosine_with_restarts.", low=1, high=1000, level="advanced")
    max_grad_norm: float = knob(
        1.0, help="Gradients longer than this are shortened to it; 0 never.", low=0.0, high=10**6, level="advanced"
    )
    ema_decay: float = knob(
        0.0,
        help="Save the running mean of the weights instead of the last ones; 0 turns it off.",
        low=0.0,
        high=0.99999,
        label="EMA decay",
        level="advanced",
    )
    seed: int = knob(0, help="Order, noise and timesteps follow from it.", low=0, high=2**53 - 1)
    mixed_precision: str = knob(
        "bf16",
        help="What the networks compute in; weights that train are kept in 32 bits in every case.",
        choices=("no", "bf16", "fp16"),
        level="advanced",
    )
    find_unused_parameters: bool = knob(
        False, help="Several processes: allow weights that take no part in a step.", level="advanced"
    )


@dataclass(frozen=True)
class LossSection:
    timestep_sampling: str = knob(
        "uniform",
        help="Which noise levels are practised. shifted: uniform, then moved as the model's own schedule does.",
        choices=("uniform", "logit_normal", "mode", "shifted"),
        level="advanced",
    )
    logit_mean: float = knob(0.0, help="Mean of logit_normal.", low=-10.0, high=10.0, level="advanced")
    logit_std: float = knob(1.0, help="Standard deviation of logit_normal.", low=0.01, high=10.0, level="advanced")
    mode_scale: float = knob(
        1.29, help="How much the mode of `mode` is favoured.", low=-1.0, high=1.75, level="advanced"
    )
    high_noise_share: float = knob(
        0.0, help="Share of samples drawn uniformly from the noisiest levels.", low=0.0, high=1.0, level="advanced"
    )
    high_noise_from: float = knob(0.8, help="Where those begin.", low=0.0, high=0.999, level="advanced")
    loss_weighting: str = knob(
        "none",
        help="Weight of a sample by its noise level: none, scheduler (DiffSynth's bell), min_snr.",
        choices=("none", "scheduler", "min_snr"),
        level="advanced",
    )
    min_snr_gamma: float = knob(5.0, help="Limit of min_snr.", low=0.1, high=1000.0, level="advanced")
    distill_steps: int = knob(
        4, help="direct_distill: steps in which the student draws.", low=1, high=100, level="advanced"
    )


@dataclass(frozen=True)
class LoraSection:
    lora_base_model: str | None = knob(
        None, help="Part that gets the LoRA. With neither this nor `trainable_models` it is dit."
    )
    lora_target_modules: str = knob(
        "",
        help="Modules that get it: ends of names, comma-separated; a regular expression over whole names; all-linear; or a "
        "preset of the family such as attention. Empty: the family's default.",
        lines=2,
    )
    lora_rank: int = knob(32, help="How much it can hold; the file grows with it.", low=1, high=4096, label="Rank")
    lora_alpha: float | None = knob(
        None, help="Strength is alpha / rank; by default equal to the rank.", low=0.0, label="Alpha", level="advanced"
    )
    lora_algorithm: str = knob("lora", help="Kind of adapter.", choices=ADAPTERS, label="Kind", level="advanced")
    lora_dropout: float = knob(0.0, help="Dropout inside the adapter.", low=0.0, high=0.9, level="advanced")
    lora_rank_pattern: str | None = knob(
        None, help='Other ranks for some modules, as JSON: `{"attn.to_q": 8}`.', level="advanced"
    )
    lora_alpha_pattern: str | None = knob(None, help="Other alphas for some modules, as JSON.", level="advanced")
    lora_checkpoint: str | None = knob(None, help="A LoRA file to begin from.", level="advanced")
    preset_lora_path: str | None = knob(
        None, help="A LoRA that is merged into the base first; the new one learns the difference.", level="advanced"
    )
    preset_lora_model: str | None = knob(None, help="Part it is merged into.", level="advanced")


@dataclass(frozen=True)
class MemorySection:
    use_gradient_checkpointing: bool = knob(
        False, help="Compute activations again in the backward pass instead of keeping them.", level="advanced"
    )
    use_gradient_checkpointing_offload: bool = knob(
        False, help="Keep what gradient checkpointing stores in RAM; turns checkpointing on.", level="advanced"
    )
    enable_model_cpu_offload: bool = knob(
        False,
        help="Keep frozen weights in RAM and fetch them block by block, forwards and backwards. On a CPU they stay in the file.",
        label="Model CPU offload",
        level="advanced",
    )
    enable_optimizer_cpu_offload: bool = knob(
        False,
        help="Keep the optimizer's state in RAM and compute its step on the CPU.",
        label="Optimizer CPU offload",
        level="advanced",
    )


@dataclass(frozen=True)
class OutputSection:
    name: str = knob("lora", help="Name of the run; it is written into the files it makes.")
    output_path: str = knob("./models", help="Folder for the results and for the run's own files.", level="advanced")
    remove_prefix_in_ckpt: str = knob(
        "pipe.dit.", help="Cut from the names in the saved files.", level="advanced", label="Remove prefix"
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


@dataclass(frozen=True)
class TrainingConfig:
    """A run. `--name value` on the command line, a field in the form, a key in `config.json`: the same names."""

    model: ModelSection = section(ModelSection, "Model")
    dataset: DatasetSection = section(DatasetSection, "Dataset")
    lora: LoraSection = section(LoraSection, "LoRA")
    training: TrainingSection = section(TrainingSection, "Training")
    prior: PriorSection = section(PriorSection, "Keeping what it knows")
    loss: LossSection = section(LossSection, "Noise and loss")
    samples: SampleSection = section(SampleSection, "Samples and validation")
    memory: MemorySection = section(MemorySection, "Memory")
    output: OutputSection = section(OutputSection, "Output")
