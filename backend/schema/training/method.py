"""How a training run learns: task, optimizer, noise and loss, adapter, and what it does for want of memory.

DiffSynth-Studio's names where it has them.
"""

from __future__ import annotations

from dataclasses import dataclass

from backend.schema.allowed_classes import is_listed
from backend.schema.messages import Trouble
from backend.schema.settings import knob, switch

TASKS = (
    "sft",
    "sft:data_process",
    "sft:train",
    "direct_distill",
    "direct_distill:data_process",
    "direct_distill:train",
)
SCHEDULES = ("constant", "linear", "linear_from_half", "cosine", "cosine_with_restarts")
ADAPTERS = ("lora", "dora", "rslora", "loha", "lokr", "oft")


# Packages of optimizers and schedules. Importing a module runs it, so a name in a file, a form or a preset leads to
# these alone.
OPTIMIZER_PACKAGES = (
    "torch.optim",
    "bitsandbytes.optim",
    "torchao.optim",
    "transformers.optimization",
    "pytorch_optimizer",
    "prodigyopt",
    "schedulefree",
    "lion_pytorch",
    "dadaptation",
    "came_pytorch",
    "galore_torch",
    "backend.training.optim.optimizers",
)


@dataclass(frozen=True)
class TrainingSection:
    task: str = knob(
        "sft",
        help="What is learnt. `:data_process` computes and stores what needs no gradient, `:train` trains from that.",
        choices=TASKS,
        level="advanced",
    )
    learning_rate: float = knob(
        1e-4, help="How large each step is. 1e-4 suits a LoRA of a large model.", low=0.0, high=10.0
    )
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
        help="adamw, adam, sgd, adafactor, lion, muon (block matrices; AdamW for the rest), adamw8bit, prodigy, or "
        "a class of a "
        "known package by its dotted name such as `torch.optim.RMSprop`.",
        label="Optimizer",
        level="advanced",
    )
    allow_custom_code: bool = switch(
        help=(
            "Let --customized_optimizer name a class of any package, which is imported and so run. A command line "
            "alone can say it."
        )
    )
    optimizer_args: str | None = knob(
        None, help='More arguments of the optimizer as JSON: `{"betas": [0.9, 0.99]}`.', level="advanced"
    )
    weight_decay: float = knob(0.01, help="Weight decay.", low=0.0, high=10.0, level="advanced")
    lr_scheduler: str = knob(
        "constant",
        help=(
            "How the learning rate goes on after the warm-up. linear_from_half: constant to the middle, then down to 0."
        ),
        choices=SCHEDULES,
        label="Schedule",
        level="advanced",
    )
    lr_schedulers: str | None = knob(
        None,
        help="Schedules of single parts: `text_encoder=cosine`, comma-separated.",
        label="Schedules of parts",
        level="advanced",
    )
    lr_warmup_steps: int = knob(
        0, help="Steps over which it rises from 0.", low=0, high=10**6, label="Warm-up", level="advanced"
    )
    lr_restarts: int = knob(1, help="Cycles of cosine_with_restarts.", low=1, high=1000, level="advanced")
    max_grad_norm: float = knob(
        0.0, help="Gradients longer than this are shortened to it; 0 never.", low=0.0, high=10**6, level="advanced"
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
    devices: int = knob(
        1,
        help="Devices of this machine that train together, each a share of every step.",
        low=1,
        high=1024,
        level="advanced",
    )
    deterministic: bool = knob(
        False,
        help="Only algorithms that give the same bits each time, attention's backward pass among them: a run on a "
        "card that is resumed "
        "then equals one that was never stopped. Slower. On a CPU that holds in any case.",
        level="advanced",
    )
    find_unused_parameters: bool = knob(
        False, help="Several processes: allow weights that take no part in a step.", level="advanced"
    )


def check_optimizer_name(section: TrainingSection) -> None:
    """Raises Trouble("not_allowed") for an optimizer's dotted name outside `OPTIMIZER_PACKAGES`, unless a command line
    allows any."""
    module, _, name = section.customized_optimizer.strip().rpartition(".")
    if module and not section.allow_custom_code and not is_listed(module, OPTIMIZER_PACKAGES):
        raise Trouble(
            "not_allowed",
            (
                f"Optimizer (--customized_optimizer) is {f'{module}.{name}'[:200]!r}, which is of no package known for "
                "optimizers."
            ),
            hint=(
                f"Known are {', '.join(OPTIMIZER_PACKAGES[:-1])}. A class of your own takes --allow_custom_code "
                "on a command line of your own."
            ),
            setting="customized_optimizer",
        )


@dataclass(frozen=True)
class LossSection:
    timestep_sampling: str = knob(
        "scheduler",
        help="Which noise levels are practised. scheduler: those of the family's training schedule, as "
        "DiffSynth-Studio sets it (1000 "
        "levels, shifted as the model was trained); shifted: those of the schedule that the model draws a picture "
        "of this size with. direct_distill draws its steps "
        "from one of the two: from the latter unless this is scheduler.",
        choices=("scheduler", "uniform", "logit_normal", "mode", "shifted"),
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
        "scheduler",
        help=(
            "Weight of a sample by its noise level: scheduler (the bell of DiffSynth-Studio's training schedule), "
            "none, min_snr."
        ),
        choices=("scheduler", "none", "min_snr"),
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
        help="Modules that get it: ends of names, comma-separated; a regular expression over whole names; "
        "all-linear; or a "
        "preset of the family such as attention. Empty: the family's default.",
        lines=2,
    )
    lora_rank: int = knob(
        32,
        help="How much it can hold; the file grows with it. OFT: inputs that turn together.",
        low=1,
        high=4096,
        label="Rank",
    )
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
    vram: str | None = knob(
        None,
        help="auto, or GiB of the card that the run may take: what is left off below is then set so that it fits, "
        "the fastest way. auto: "
        "all that is free now. Empty: as it is set below.",
        label="VRAM",
        level="advanced",
    )
    use_gradient_checkpointing: bool = knob(
        False, help="Compute activations again in the backward pass instead of keeping them.", level="advanced"
    )
    use_gradient_checkpointing_offload: bool = knob(
        False, help="Keep what gradient checkpointing stores in RAM; turns checkpointing on.", level="advanced"
    )
    enable_model_cpu_offload: bool = knob(
        False,
        help=(
            "Keep frozen weights in RAM and fetch them block by block, forwards and backwards. On a CPU they stay "
            "in the file."
        ),
        label="Model CPU offload",
        level="advanced",
    )
    resident_blocks: int | None = knob(
        None,
        help="Of the transformer's blocks that offloading fetches, so many stay on the device, evenly spread: "
        "fewer transfers for more "
        "memory. Empty: as many as `vram` leaves room for, without that none.",
        low=0,
        high=10**4,
        level="advanced",
    )
    offload_device: str = knob(
        "ram",
        help=(
            "Where weights that are fetched wait: in RAM, or in their file, which takes no RAM and is slower. On "
            "a CPU always the file."
        ),
        choices=("ram", "disk"),
        level="advanced",
    )
    cpu_offload_split_threshold: int | None = knob(
        None,
        help="Blocks with more than this are fetched in pieces, child by child: less memory for the fetched, more "
        "transfers. Empty: whole "
        "blocks.",
        low=0,
        high=10**6,
        unit="MiB",
        level="advanced",
    )
    enable_optimizer_cpu_offload: bool = knob(
        False,
        help="Keep the optimizer's state in RAM and compute its step on the CPU.",
        label="Optimizer CPU offload",
        level="advanced",
    )
