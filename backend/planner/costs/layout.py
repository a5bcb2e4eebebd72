"""What is asked of a model, how its parts may lie, and what a process holds besides: the numbers that bytes and seconds
depend on."""

from __future__ import annotations

from dataclasses import dataclass, field

from backend.schema.memory_plan import MIB, PartLayout

DENOISERS = ("dit", "dit2")
FP8 = "float8_e4m3fn"
TRAINING_RUNGS = frozenset((
    "use_gradient_checkpointing", "use_gradient_checkpointing_offload", "customized_optimizer", "fp8_models",
    "offload_models", "resident_blocks", "offload_device", "enable_optimizer_cpu_offload",
))  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What is asked of a model, in the numbers that bytes and seconds depend on."""

    width: int = 1024
    height: int = 1024
    frames: int = 1
    steps: int = 20
    count: int = 1  # pictures, one after the other
    guidance: bool = False  # both halves go through together
    text_tokens: int = 128  # that the transformer is given
    read_tokens: int = 0  # that the text encoder reads; 0: as many
    reference_pictures: int = 0  # as large as the picture itself (layers)
    reference_tokens: int = 0  # of pictures to edit, in the transformer
    reference_pixels: int = 0  # of the largest picture to edit, as it is encoded
    seen_tokens: int = 0  # of `text_tokens`, those of pictures
    from_picture: bool = False
    lora_bytes: int = 0
    computing: str = "bfloat16"
    targets: str = ""  # "" generates; "attention", "all" or "full" trains
    method: str = ""  # of training (`method.py`); "": a LoRA without dropout, or whole weights
    trained: tuple[str, ...] = ()  # parts with weights that train
    rank: int = 32
    algorithm: str = "lora"
    trained_numel: int = 0
    batch: int = 1
    accumulates: bool = False
    samples: bool = False
    sample_size: tuple[int, int] = (0, 0)  # (width, height) of a run's samples; 0: as its pictures
    sample_tokens: int = 0  # of text in a sample; 0: as in a step
    sample_references: int = -1  # tokens of pictures that a sample is edited from; -1: as in a step
    caches: bool = True  # encodings are computed once, encoders leave before the first step
    keeps_encodings: bool = True  # on disk
    keeps_states: int = 0  # full states of a run, on disk
    decoder_dtype: str = "bfloat16"
    total_steps: int = 1
    saved_number_bytes: int = 2  # of a result
    unknown_optimizer: bool = False  # whose state and update are counted as AdamW's
    averages: bool = False  # a running mean of the weights is saved
    idle_numel: int = 0  # of those that train, what gets no gradient
    can: frozenset[str] = TRAINING_RUNGS  # knobs that the trainer has
    step_cache: bool = False
    compiled: bool = False
    fp8_products: bool = False
    quantized: tuple[
        tuple[str, str], ...
    ] = ()  # (part, storage) of parts that are quantized when they are drawn with, and stay

    @property
    def encodes(self) -> bool:
        """Whether pictures go through the autoencoder before the first step."""
        return bool(self.from_picture or self.reference_pictures or self.reference_tokens)


@dataclass(frozen=True)
class Update:
    """Bytes that an optimizer's step on a card makes and drops."""

    at_once: float = 4.0  # for each trained number: it steps on all weights together
    in_turn: float = 0.0  # for each number of the largest weight: one after the other


@dataclass(frozen=True)
class Layout:
    """A whole arrangement: one candidate of the planner."""

    parts: dict[str, PartLayout] = field(default_factory=dict)
    tiled: bool = False
    halves_apart: bool = False  # of guidance
    checkpointed: bool = False
    checkpoints_in_ram: bool = False
    state_bytes: float = 8.0  # of the optimizer, per trained number
    states_in_ram: bool = False
    update: Update = Update()


@dataclass(frozen=True)
class Fixed:
    """What a process holds on the card beyond tensors, and in RAM before it begins."""

    context_low_bytes: int = 256 * MIB
    context_high_bytes: int = 460 * MIB
    workspace_bytes: int = 40 * MIB  # matrix product libraries
    ram_bytes: int = 900 * MIB  # interpreter, torch and CUDA libraries
    pool: str = "expandable"  # which allocator: "native" where segments cannot grow (Windows)
    converts: bool = True  # 16-bit convolutions copy what they read and write into another layout (cuDNN)
    learnt_bytes: int = 0  # measured minus predicted, on this device and family
    on_cpu: bool = False  # whose kernels and attention run

    def corrected(self, live: int) -> int:
        """`live` bytes with what was learnt: half of them at most, since what a large job took besides says little of a
        small one."""
        return live + max(-live // 2, min(live // 2, self.learnt_bytes))

    def correction(self, corrected: int) -> int:
        """What `corrected` bytes hold of it."""
        live = corrected - self.learnt_bytes
        return corrected - max(corrected * 2 // 3, min(2 * corrected, live))


CPU_FIXED = Fixed(
    context_low_bytes=0, context_high_bytes=0, workspace_bytes=0, ram_bytes=500 * MIB, converts=False, on_cpu=True
)


@dataclass(frozen=True)
class Working:
    """Live bytes of a stage, and the pool that an allocator needs for them."""

    live: int = 0
    least: int = 0
    likely: int = 0
