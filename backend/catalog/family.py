"""What a family of models is: the typed contract (`Family`), the records that it is written in, and what counts where a family says nothing.

A family is a module or a package of `backend/families`. It owns everything that is true of its models alone: the files they come in, the
networks they are made of, how a prompt is encoded, how the network is called, how it is guided and noised. The engine, the trainer, the
planner and the page know families by this contract only, and read nothing else of them. No torch is imported here.

How to write one: `docs/adding-a-family.md`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple, Protocol, cast

from backend.catalog.spec import ModelSpec


@dataclass(frozen=True)
class Part:
    """One network of a family."""

    network: str  # "package.module:Class", imported only when a part is loaded
    folder: str  # its folder in the diffusers layout: "transformer", "text_encoder", "vae"
    phase: str  # "text" | "denoise" | "decode": when it is needed on the card
    files: tuple[str, ...] = ("diffusion_pytorch_model*.safetensors", "model*.safetensors")
    needed: bool = True  # no picture without it
    variants: tuple[str, ...] = ()  # the variants that have it; empty: all. Others leave it in its file
    blocks: tuple[str, ...] = ()  # module lists whose members are moved one at a time: ("transformer_blocks",)
    config: dict = field(default_factory=dict)  # keyword arguments of the class where no config.json lies beside
    config_key: str = ""  # the entry of config.json that holds them ("text_config"); the whole file where it is absent
    prefixes: tuple[str, ...] = ()  # cut from stored names, longest first, before they are compared with the module's
    unused: tuple[
        str, ...
    ] = ()  # stored names (after the cut) that begin so are not loaded: a vision tower, an lm_head
    keep_precise: tuple[
        str, ...
    ] = ()  # kinds of module that stay in the computing dtype when weights are stored in FP8
    for_pictures: bool = False  # called only where the variant works from pictures: a vision tower
    label: str = ""  # for people, without article ("vision tower"); "": the usual one of its name
    # Of a text encoder, the hidden states that are used: after so many layers, or -2 as in transformers' `hidden_states[-2]`. Blocks above the
    # last of them are not loaded, and its config says `num_hidden_layers` without them.
    taps: tuple[int, ...] = ()

    def blocks_below_taps(self, depth: int) -> int:
        """How many of an encoder's `depth` blocks are loaded."""
        reached = max((tap if tap >= 0 else depth + 1 + tap for tap in self.taps), default=depth)
        return max(1, min(reached, depth))

    def of_variant(self, variant: str) -> bool:
        return not self.variants or variant in self.variants


@dataclass(frozen=True)
class Signature:
    """Parameter names and shapes that make a set of tensors this part of this family.

    `must` and `must_not` are the part's own names (or, for `dialect` not "", names in that dialect), after the prefixes were
    cut; "{}" stands for a number, tried with 0. `shapes` says what some of them must measure, None for any size.
    """

    part: str
    variant: str
    must: tuple[str, ...]
    must_not: tuple[str, ...] = ()
    shapes: dict[str, tuple[int | None, ...]] = field(default_factory=dict)
    dialect: str = ""
    title: str = ""


@dataclass(frozen=True)
class Rule:
    """One module in another spelling and the modules it stands for; "{}" is a number, the same on both sides.

    A fused module is several: its rows belong to `modules` in turn, in the proportions `rows` (empty: as many as each has).
    `swap_halves`: the two halves of its rows are exchanged. `leaf` renames the last name of a checkpoint's key.
    `place` (start, stop, whole): it is only those rows of the module. `parameter`: what is named is this parameter of the
    module ("scale_shift_table") and not a module with a weight.
    """

    theirs: str
    modules: tuple[str, ...]
    rows: tuple[int, ...] = ()
    swap_halves: bool = False
    leaf: dict[str, str] = field(default_factory=dict)
    place: tuple[int, int, int] | tuple[()] = ()
    parameter: str = "weight"


@dataclass(frozen=True)
class NameMap:
    """A dialect: how another program spells the modules of one part. Modules that no rule names are spelt alike."""

    dialect: str
    part: str
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True)
class LoraSign:
    """Module names that make a LoRA file one for this family: regular expressions over flattened names, prefix cut off.

    Every one of `names` must be found in some name, none of `never` in any; `widths` says which input widths a module may
    have whose name matches, `rows` how many outputs. A sign without `sure` says only that the family is possible.
    """

    names: tuple[str, ...]
    never: tuple[str, ...] = ()
    widths: dict[str, tuple[int, ...]] = field(default_factory=dict)
    rows: dict[str, tuple[int, ...]] = field(default_factory=dict)
    sure: bool = True


@dataclass(frozen=True)
class TextSign:
    """Module names of a text encoder, by which a LoRA file without a denoiser's modules is known: regular expressions that the flattened
    name and the file's prefix before it begin with, and the input widths it may have."""

    names: str
    widths: tuple[int, ...]
    prefix: str = ""


@dataclass(frozen=True)
class LoraTargets:
    """Which modules of which part a LoRA touches: `presets` name -> ends of module names; `default` is one of the names."""

    part: str = "dit"
    presets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    default: str = ""

    @property
    def modules(self) -> tuple[str, ...]:
        return self.presets.get(self.default, ())


@dataclass(frozen=True)
class SizeRule:
    """Which sizes a model draws: both sides a multiple of `multiple`; `pixels` is the area it was trained for (0: any)."""

    multiple: int = 16
    pixels: int = 0
    compression: int = 8  # pixels per latent cell
    patch: int = 2  # latent cells per token
    frame_compression: int = 1  # frames per latent frame, of which the first holds one alone

    @property
    def pixels_per_token(self) -> int:
        return (self.compression * self.patch) ** 2

    def cells(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) of latent cells of a picture of so many pixels."""
        return height // self.compression, width // self.compression

    def tokens(self, width: int, height: int, frames: int = 1) -> int:
        """Of what is drawn, without text."""
        side = self.compression * self.patch
        return (height // side) * (width // side) * (1 + (frames - 1) // self.frame_compression)


@dataclass(frozen=True)
class TrainingSchedule:
    """The noise levels that a family is trained at, as DiffSynth-Studio's `FlowMatchScheduler` sets them for training.

    Even levels from 1 down (to `lowest`, itself included, where that is given), each shifted to `shift` * s / (1 + (`shift` - 1) * s), then stretched towards 0 so that the last is `terminal`
    (None: as they are). An exponential shift by mu is `shift` = e^mu.
    """

    shift: float
    terminal: float | None = None
    lowest: float | None = None


@dataclass(frozen=True)
class Defaults:
    """What differs from the general defaults: fields of `GenerationRequest` and knobs of `TrainingConfig` by name."""

    request: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Tokenizer:
    """One tokenizer of a family, under the name that it has among the parts of a pipeline ("tokenizer", "tokenizer_2")."""

    folder: str = "tokenizer"  # its folder in the diffusers layout
    usual: tuple[str, str] | tuple[()] = ()  # (model id, pattern): where a script that names none means it to come from


@dataclass(frozen=True)
class EditRule:
    """How a variant works from pictures: to edit, as references, as a first frame."""

    most: int | None = 1  # pictures; None: as many as memory holds
    must: bool = True  # there is no picture without one
    at_output_size: bool = False  # they are brought to the size that is drawn, not to an area of their own
    usual_processor: tuple[str, str] | tuple[()] = ()  # (model id, pattern), as for a tokenizer
    shown: str = (
        ""  # how the text encoder is shown them: encodings of variants for which this differs are not each other's
    )
    hint: str = ""  # what helps whoever gives more than `most`


@dataclass(frozen=True)
class Guidance:
    """How a variant is guided. A scale of 1 is no guidance, in every family; one that counts from 0 adds the 1 itself."""

    kind: str = "classifier_free"  # | "embedded": the scale is an input of the network, one pass | "none": distilled, the scale is not read
    training: float = 1.0  # the embedded scale that a run trains at


@dataclass(frozen=True)
class Branch:
    """One of the predictions that guidance combines at a step."""

    name: str  # its key in `guide`'s predictions: "positive", "negative", "perturbed", ...
    prompt: str = "positive"  # | "negative": which prompt's encoding it is conditioned on
    part: str = ""  # another network than the step's: "dit_uncond"
    alone: bool = (
        False  # never in one batch with the others: it is called otherwise, which `collate` is told by `branch`
    )


POSITIVE, NEGATIVE = Branch("positive"), Branch("negative", prompt="negative")


@dataclass(frozen=True)
class Prediction:
    """What a network is trained to give, and how its input is noised. sigma is the noise level, n the noise, x0 the latents.

    `noising` "flow": x = (1 - sigma) x0 + sigma n, sigma from 1 to 0. "exploding": x = x0 + sigma n (the variance-exploding form of
    k-diffusion), sigma from about 15 to 0; `predict` scales such an x by 1 / sqrt(sigma^2 + 1) for the network.
    """

    kind: str = "velocity"  # n - x0 | "epsilon": n | "v": alpha n - s x0 with alpha = 1 / sqrt(sigma^2 + 1), s = sigma alpha | "x0"
    noising: str = "flow"


@dataclass(frozen=True)
class DrawSettings:
    """What is drawn (or trained on) with which model: all that conditioning, latents and noise levels depend on beside prompts."""

    width: int  # pixels
    height: int
    frames: int = 1  # of a video
    frame_rate: float = 0.0  # frames a second
    guidance: float = 1.0
    variant: str = ""
    scheduler: Mapping[str, object] = field(default_factory=dict)  # the model's scheduler_config.json


def settings_of(spec: ModelSpec, *, width: int, height: int, frames: int = 1, guidance: float = 1.0) -> DrawSettings:
    """What is drawn with the model `spec`."""
    return DrawSettings(width, height, frames, guidance=guidance, variant=spec.variant, scheduler=spec.scheduler)


def takes_negative(family: Family, variant: str, guidance: float) -> bool:
    """Whether a picture at this scale goes through the network with a negative prompt as well: so many passes a step, and two prompts."""
    if not family.DRAWS:
        return guidance > 1
    found = family.branches(DrawSettings(0, 0, guidance=guidance, variant=variant))
    return any(branch.prompt == "negative" for branch in found)


class TokenCount(NamedTuple):
    """Tokens of a prompt: as the text encoder reads it, and of what the network is given of it."""

    read: int
    given: int


@dataclass(frozen=True)
class CachedBlocks:
    """A module list of the network whose blocks a step cache may skip. `streams`: what a block takes and gives, in the order in which it
    gives it, by keyword or (int) by place among its arguments; the picture's is the last."""

    name: str  # "transformer_blocks"
    streams: tuple[str | int, ...] = ("hidden_states",)


# What tensors are called. One tensor (B, C, h, w), with frames (B, C, F, h, w), or, of a model with several latent streams, a dict of such by
# the stream's name ({"video": ..., "audio": ...}). Shapes: B pictures, C latent channels, h x w latent cells, F latent frames, L text tokens,
# D text width, N steps.
Latents = Any  # torch.Tensor | dict[str, torch.Tensor]: latents, noise and predictions alike
Levels = Any  # noise levels (N + 1,) or (B,), float32: torch.Tensor | dict[str, torch.Tensor], by the same names
Encoding = dict[
    str, Any
]  # of one prompt: name -> tensor without a batch dimension; "references": a tuple of its pictures' latents
Conditioning = Any  # what `collate` makes and `predict` takes; nobody else looks into it

# Names of parts are roles, as in DiffSynth-Studio: the denoiser, another expert of it or a second network, encoders, the autoencoder of pictures.
PART_LABELS = {
    "dit": "transformer",
    "dit2": "second transformer",
    "text_encoder": "text encoder",
    "text_encoder_2": "second text encoder",
    "text_encoder_3": "third text encoder",
    "vision": "vision tower",
    "vae": "VAE",
}


def part_label(name: str) -> str:
    """What a part of that name is usually called for people, without article."""
    return PART_LABELS.get(name, name.replace("_", " "))


def drawing(function: Callable) -> Callable:
    """Marks a member of `Family` that one has to have that draws."""
    function.__dict__["needed_to_draw"] = True
    return function


class Family(Protocol):
    """The contract. Constants without a value here are required; functions marked `drawing` are, of a family that draws (`DRAWS`). All else
    may be absent from a family, and what stands here then counts: `complete` fills it in.

    Functions of the first three groups are free of torch. The others get tensors and import torch, diffusers and transformers inside.
    `parts` is a dict of what a loaded model is made of: modules by the names in `PARTS`, tokenizers by those in `TOKENIZERS`, and, of variants
    that work from pictures, "processor".
    """

    # --- What it is called ---

    NAME: str  # for programs: the module's name
    TITLE: str  # for people
    WORDS: tuple[str, ...] = ()  # how metadata of LoRA files names it, in lower case
    PIPELINE: str = ""  # its class in `backend.pipelines`, called as in DiffSynth-Studio where that has one; "": none
    DIFFSYNTH_SCHEDULES: Mapping[
        str, Mapping
    ] = {}  # template of its FlowMatchScheduler -> changes of the scheduler's configuration
    DIFFSYNTH_ABSENT: Mapping[
        str, str
    ] = {}  # what its scripts import for this family alone, and why there is nothing for it here
    PIPELINE_DEFAULTS: Mapping[
        str, object
    ] = {}  # fields of GenerationRequest that a call of that class means otherwise than the page

    # --- Files: parts, how they are known, their names ---

    PARTS: dict[str, Part]
    TOKENIZERS: Mapping[str, Tokenizer] = MappingProxyType({"tokenizer": Tokenizer()})
    SIGNATURES: tuple[Signature, ...]
    NAME_MAPS: tuple[NameMap, ...] = ()
    VARIANT_CONFIG: Mapping[str, dict] = {}  # variant -> keyword arguments of the transformer's class that it needs
    WHOLE_CONFIG: Mapping[
        str, object
    ] = {}  # keyword arguments by which the transformer's class has the modules of all variants
    SCHEDULER: Mapping[str, object] = {}  # scheduler_config.json where a model brings none
    LORA: LoraTargets
    LORA_SIGNS: tuple[LoraSign, ...] = ()  # how LoRA files for it are known
    LORA_NAMES: Mapping[
        str, str
    ] = {}  # layout of a file -> the dialect that its names are in, if not the first of NAME_MAPS
    # layout of a file -> text encoder -> how it is called there, if not lora_te1, lora_te2 ("kohya") and by its kind ("comfyui")
    LORA_TEXT_NAMES: Mapping[str, Mapping[str, str]] = {}
    LORA_TEXT_SIGNS: tuple[
        TextSign, ...
    ] = ()  # modules of its text encoders, by which a LoRA file can be told to be for it

    def config_from_shapes(self, part: str, shapes: dict[str, tuple[int, ...]]) -> dict:
        """Keyword arguments of the part's class where no config.json lies beside its file; `shapes`: parameter name -> shape.
        Raises Trouble where shapes do not tell enough."""
        return {}

    def derived_maps(self, part: str, modules: Iterable[str]) -> tuple[NameMap, ...]:
        """Dialects that depend on how many modules there are, whose names are `modules`."""
        return ()

    def config_from_lora(self, widths: tuple[tuple[str, int, int], ...]) -> dict:
        """Keyword arguments of the transformer's class that a LoRA file's (module, input width, rows) show."""
        return {}

    def tell_variant(self, variant: str, class_name: str, config: dict, path: Path) -> tuple[str, str, str] | None:
        """A variant that a transformer's tensors do not show, as (variant, title, by what); None: it is `variant`, as its signature says.
        From the pipeline's class in model_index.json, the config of the transformer, and the place of its file."""
        return None

    # --- What is drawn: sizes, guidance, pictures it works from, what it takes ---

    DRAWS: bool = False  # whether pictures are made with it; else its files are known and LoRA files for it worked with
    NOT_DRAWN: tuple[str, ...] = ()  # variants that are not
    DEFAULTS: Defaults
    SIZES: SizeRule
    GUIDANCE: Guidance = Guidance()
    PREDICTION: Prediction = Prediction()
    SAMPLERS: tuple[str, ...] = ("euler",)  # of `engine.pipeline.sampler.METHODS`, its usual one first
    TRAINING_SCHEDULE: TrainingSchedule = TrainingSchedule(shift=1.0)
    EDITS: Mapping[str, EditRule] = {}  # variant -> how it works from pictures; of others none are given
    EDIT_HINT: str = (
        "Choose a model that edits pictures."  # what helps whoever gives pictures to a variant that takes none
    )
    IMAGE_CHANNELS: int = 3  # of pixels that `encode_image` takes and `decode` gives; 4: with opacity
    COMPUTE_DTYPES: tuple[str, ...] = (
        "bfloat16",
        "float16",
        "float32",
    )  # that its networks bear without overflow, the best first
    FLOAT32_LATENTS: bool = (
        False  # latents stay float32 between steps whatever the network computes in; `predict` rounds them
    )
    TILES: tuple[int, int] = (64, 48)  # latent cells a side of a tile of the VAE's, and from one to the next
    CACHED_BLOCKS: tuple[CachedBlocks, ...] = ()  # in the order in which they compute; none: steps are not cached
    CPU_ATTENTION_TOKENS: int = 0  # sequences of picture tokens up to this long train faster with `use_cpu_attention`

    def sizes(self, variant: str) -> SizeRule:
        """The sizes and the geometry of a variant."""
        return self.SIZES

    def guidance(self, variant: str) -> Guidance:
        return self.GUIDANCE

    def prediction(self, variant: str, scheduler: Mapping[str, object]) -> Prediction:
        return self.PREDICTION

    def part_label(self, part: str) -> str:
        """What a part is called for people, without article: "transformer"."""
        described = self.PARTS.get(part)
        return (described.label if described else "") or part_label(part)

    def parts_of(self, phase: str, variant: str, *, pictures: bool = False) -> tuple[str, ...]:
        """The parts that a phase ("text", "denoise", "decode") of `variant` calls; `pictures`: where it works from some."""
        return tuple(
            name
            for name, part in self.PARTS.items()
            if part.phase == phase and part.of_variant(variant) and (pictures or not part.for_pictures)
        )

    def branches(self, settings: DrawSettings) -> tuple[Branch, ...]:
        """The predictions that a step combines, the positive first. The plan counts the passes of a step by it."""
        if self.guidance(settings.variant).kind == "classifier_free" and settings.guidance > 1:
            return POSITIVE, NEGATIVE
        return (POSITIVE,)

    def guidance_at(self, settings: DrawSettings, step: int, num_steps: int) -> float:
        """The scale at step `step`, from 0; at 1 and below only the positive branch is computed."""
        return settings.guidance

    def expert(self, settings: DrawSettings, sigma: float) -> str:
        """The part that computes at noise level `sigma`, of a model with experts for ranges of it."""
        return "dit"

    def sigma_range(self, part: str, variant: str) -> tuple[float, float]:
        """The noise levels (lowest, highest) that the expert `part` trains at."""
        return 0.0, 1.0

    def count_tokens(
        self, folders: Mapping[str, Path], prompts: Sequence[str], *, variant: str, seen: Sequence[Sequence[int]] = ()
    ) -> list[TokenCount] | None:
        """Tokens of each prompt by the tokenizers in `folders` (name -> folder); None: guessed from its letters. `seen`: of each prompt, how many
        tokens each of its pictures takes among the text's. Only packages without torch."""
        return None

    COUNTS_TOKENS: bool = False  # `count_tokens` knows the templates around a prompt: the tokenizer's file is worth fetching for an estimate

    def most_tokens(self, variant: str, *, pictures: bool = False) -> TokenCount | None:
        """The most tokens of words that are read of a prompt and given on, where there is a limit."""
        return None

    def edited_size(self, pictures: Sequence[tuple[int, int]], variant: str, pixels: int) -> tuple[int, int]:
        """(width, height) of what is made of pictures of these sizes where no other is asked for; `pixels`: the area that they are
        brought to. Raises Trouble for a picture that cannot be taken."""
        return pictures[-1]

    def reference_sizes(self, pictures: Sequence[tuple[int, int]], pixels: int) -> tuple[tuple[int, int], ...]:
        """(width, height) of what the VAE reads of pictures of these sizes, brought to an area of `pixels`. Raises Trouble as above."""
        return tuple(pictures)

    def reference_tokens(self, pictures: Sequence[tuple[int, int]], pixels: int) -> int:
        """Tokens that pictures of these sizes add to the network's sequence."""
        return sum(self.SIZES.tokens(*size) for size in self.reference_sizes(pictures, pixels))

    def seen_tokens(self, pictures: Sequence[tuple[int, int]], pixels: int) -> int:
        """Text tokens that pictures of these sizes, brought to an area of `pixels` for the text encoder, take the places of."""
        return 0

    def reference_pixels(self, variant: str, folder: Path | None) -> tuple[int, int]:
        """(area in pixels that the VAE, that the text encoder sees a picture in) for the model in `folder`."""
        return self.SIZES.pixels, self.SIZES.pixels

    # --- Prompts: loading what reads them, encoding, conditioning ---

    @drawing
    def load_tokenizer(self, folder: Path, name: str = "tokenizer") -> Any:
        """The tokenizer `name` in `folder`. Raises Trouble where there is none: transformers would make one that knows no word."""

    def load_processor(self, folder: Path, variant: str, *, pixels: int | None = None) -> Any:
        """What cuts pictures for the text encoder, with `reference_pixels` (an area); `pixels`: another area than the model's own.
        Of variants in `EDITS` whose encoder sees pictures."""
        return None

    def prepare(self, part: str, module: Any) -> None:
        """Makes a freshly built part quicker without changing what it computes or how its parameters are called."""

    def use_cpu_attention(self, module: Any) -> bool:
        """Gives a transformer the attention that trains faster on a CPU for short sequences, with the same numbers to rounding; whether
        it did."""
        return False

    @drawing
    def encode_text(
        self,
        parts: dict,
        prompts: Sequence[str],
        *,
        device: Any = None,
        pictures: Sequence[Sequence[Any]] | None = None,
        variant: str = "",
        negative: bool = False,
    ) -> list[Encoding]:
        """One encoding a prompt on `device`, in the dtype that its encoders compute in. Differentiable. `pictures`: of each prompt, the PIL
        pictures that go with it; `negative`: the prompts are negative ones, for families that treat those otherwise. Floating tensors of an
        encoding are kept in the computing dtype, others (token ids, masks) as they are."""
        raise NotImplementedError

    def truncated(self, parts: dict, prompt: str, encoding: Encoding, pictures: Sequence[Any] = ()) -> int | None:
        """How many tokens of the prompt's words were read, where it is longer; None where all were."""
        return None

    def num_tokens(self, encoding: Encoding) -> int:
        """L: the text tokens that the network is given."""
        return next(len(tensor) for name, tensor in encoding.items() if name != "references" and tensor.ndim == 2)

    def cache_key(self, variant: str) -> tuple:
        """What an encoding depends on besides the prompt, its pictures, the parts and tokenizers, and this family's code (all of which are in
        the key of what is cached anyway)."""
        return ()

    @drawing
    def collate(
        self,
        encodings: Sequence[Encoding],
        settings: DrawSettings,
        *,
        branch: Branch | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> Conditioning:
        """Encodings side by side, as `predict` takes them: padded, with masks, positions, size embeddings, and of embedded guidance the scale
        `settings.guidance`. `branch`: the one that is computed alone. Raises Trouble where encodings cannot go through together."""
        raise NotImplementedError

    def prefill(self, parts: dict, cond: Conditioning) -> Conditioning:
        """Called once a picture before its first step, with the network ready to compute: `cond` with what does not change over the steps."""
        return cond

    # --- Pictures: latents and back ---

    @drawing
    def latent_shape(self, settings: DrawSettings) -> Any:
        """(C, h, w), with frames (C, F, h, w), of one picture's latents; of several streams a dict of such."""
        raise NotImplementedError

    @drawing
    def encode_image(self, parts: dict, pixels: Any, *, generator: Any = None, tiled: bool = False) -> Latents:
        """Pixels (B, 3, H, W), with frames (B, 3, F, H, W), in [-1, 1] as normalised latents: the mean, or with a `generator` (of the CPU) a
        sample. Differentiable. `tiled`: in pieces, for less memory."""
        raise NotImplementedError

    def encode_references(
        self, parts: dict, pictures: Sequence[Any], *, settings: DrawSettings | None = None, tiled: bool = False
    ) -> tuple:
        """Latents without a batch dimension of each of `pictures` (PIL): an encoding's "references". `settings`: what is drawn, where
        `EditRule.at_output_size`."""
        return ()

    @drawing
    def decode(self, parts: dict, latents: Latents, *, tiled: bool | tuple[int, int] = False) -> Any:
        """Pixels (B, 3, H, W) in [-1, 1] of normalised latents; with frames or layers (B, 3, F, H, W); with opacity 4 channels. `tiled`: in
        pieces of `TILES`, or of the two numbers given."""
        raise NotImplementedError

    def decode_sound(self, parts: dict, latents: Latents) -> tuple[Any, int] | None:
        """(waveform (B, channels, samples) in [-1, 1], samples a second), of a model that makes sound too."""
        return None

    def preview_latents(self, latents: Latents) -> Any:
        """The latents (1, C, h, w) of which a preview is drawn: of a video the middle frame, of several streams the first."""
        one = next(iter(latents.values())) if isinstance(latents, dict) else latents
        return one[:, :, one.shape[2] // 2] if one.ndim == 5 else one

    # --- Denoising: levels, the network's call, guidance; and what training asks of them ---

    @drawing
    def sigmas(self, settings: DrawSettings, num_steps: int) -> Levels:
        """Noise levels (N + 1,) float32 falling to 0, as diffusers' scheduler with the model's configuration sets them; of several streams
        each its own, as many of one as of another."""
        raise NotImplementedError

    @drawing
    def predict(
        self,
        parts: dict,
        x: Latents,
        sigma: Levels,
        cond: Conditioning,
        *,
        part: str = "dit",
        sigma_next: Levels | None = None,
    ) -> Latents:
        """What the network `parts[part]` predicts at `x` and noise levels `sigma` (B,): of the kind `prediction` says, in the shape of `x`, and
        of no other sign than that (a network that gives the negative is negated here). This is the only call of the network: drawing,
        previews, training, tracing and caching go through it. Differentiable. `sigma_next`: where this step goes, for flow maps."""
        raise NotImplementedError

    def guide(self, predictions: Mapping[str, Latents], scale: float, *, x: Latents, sigma: Levels) -> Latents:
        """One prediction of those of the branches, by their names. `x` and `sigma` (B,): where they were made, for guidance that works on
        denoised latents."""
        both = predictions["positive"], predictions["negative"]
        return each_stream(lambda positive, negative: negative + scale * (positive - negative), *both)

    def training_levels(self, settings: DrawSettings, count: int) -> Any:
        """The `count` noise levels that a run practises evenly, float32, falling; None: those of TRAINING_SCHEDULE. A family whose noising is
        "exploding" has to say them: the table of its discrete timesteps."""
        return None

    def initial(self, noise: Latents, sigmas: Levels, settings: DrawSettings) -> Latents:
        """What drawing from nothing begins with, at sigmas[0]."""
        if self.prediction(settings.variant, settings.scheduler).noising == "flow":
            return noise
        return each_stream(lambda one, levels: one * float(levels[0]), noise, sigmas)

    def noised(self, latents: Latents, noise: Latents, sigma: Levels, settings: DrawSettings) -> Latents:
        """`latents` with `noise` at levels `sigma` (B,) or ()."""
        said = self.prediction(settings.variant, settings.scheduler)
        return each_stream(lambda x0, n, level: _noised(said, x0, n, _level(level, x0)), latents, noise, sigma)

    def target(self, latents: Latents, noise: Latents, sigma: Levels, settings: DrawSettings) -> Latents:
        """What `predict` is to give at `noised(latents, noise, sigma)`."""
        said = self.prediction(settings.variant, settings.scheduler)
        return each_stream(lambda x0, n, level: _target(said, x0, n, _level(level, x0)), latents, noise, sigma)

    def derivative(self, prediction: Latents, x: Latents, sigma: Levels, settings: DrawSettings) -> Latents:
        """dx / dsigma, which samplers integrate, of a prediction at `x`. The latents expected at the end are x - sigma * this."""
        said = self.prediction(settings.variant, settings.scheduler)
        return each_stream(lambda one, at, level: _derivative(said, one, at, _level(level, at)), prediction, x, sigma)

    # --- Tracing: inputs without numbers ---

    def example_inputs(self, module: Any, point: Mapping[str, int], dtype: Any) -> tuple[Latents, Levels, Conditioning]:
        """(x, sigma, cond) for `predict` at a point, of tensors that are never read: `torch.empty`. `module`: the transformer, whose config
        tells widths. `point`: h, w latent cells, f latent frames, t text tokens, b pictures. Of a family whose memory is foretold."""
        raise NotImplementedError(f"{self.TITLE} has no example inputs")

    def trace_encoder(self, part: str, module: Any, point: Mapping[str, int], dtype: Any) -> Any:
        """What a text-phase part does for `t` tokens and `b` prompts, on tensors that are never read; None: as encoders of its class
        usually are called."""
        return None


REQUIRED = tuple(name for name in inspect.get_annotations(Family) if name not in Family.__dict__)
OPTIONAL = tuple(
    name for name in (*inspect.get_annotations(Family), *Family.__dict__) if name in Family.__dict__ and name[0] != "_"
)
TO_DRAW = tuple(name for name in OPTIONAL if getattr(Family.__dict__[name], "needed_to_draw", False))


def complete(module: ModuleType) -> Family:
    """The module as a `Family`: what it leaves out is set to what stands there. Raises TypeError for what it has to have and has not."""
    missing = [name for name in REQUIRED if not hasattr(module, name)]
    draws = getattr(module, "DRAWS", Family.DRAWS)
    missing += [name for name in TO_DRAW if draws and not hasattr(module, name)]
    if missing:
        raise TypeError(
            f"{module.__name__} is no family: it lacks {', '.join(missing)} (backend.catalog.family.Family)"
        )
    for name in dict.fromkeys(OPTIONAL):
        if not hasattr(module, name):
            value = Family.__dict__[name]
            setattr(module, name, MethodType(value, module) if inspect.isfunction(value) else value)
    return cast(Family, module)


def each_stream(work: Callable, *values: Any) -> Any:
    """`work` on tensors, or, where the first value is a dict of streams, on those of each stream; what is no dict is the same for all."""
    if not isinstance(values[0], dict):
        return work(*values)
    return {name: work(*(value[name] if isinstance(value, dict) else value for value in values)) for name in values[0]}


def _level(sigma: Any, like: Any) -> Any:
    """`sigma` () or (B,) with as many dimensions as `like`."""
    return sigma if sigma.ndim == 0 else sigma.view(-1, *[1] * (like.ndim - 1))


# The algebra of sampling and training. Sources: Karras et al. 2022 (arXiv 2206.00364) in k-diffusion's form for the exploding noising, with
# x = x0 + sigma n; Esser et al. 2024 (arXiv 2403.03206) for the flow. For both, dx/dsigma = (x - x0) / sigma.


def _noised(said: Prediction, x0: Any, noise: Any, sigma: Any) -> Any:
    return sigma * noise + (1.0 - sigma) * x0 if said.noising == "flow" else x0 + sigma * noise


def _target(said: Prediction, x0: Any, noise: Any, sigma: Any) -> Any:
    match said.kind:
        case "velocity":
            return noise - x0
        case "epsilon":
            return noise
        case "x0":
            return x0
        case "v":  # of the variance-preserving x / sqrt(sigma^2 + 1): Salimans and Ho 2022
            return (noise - sigma * x0) / (sigma**2 + 1) ** 0.5
    raise ValueError(f"no kind of prediction: {said.kind!r}")


def _derivative(said: Prediction, prediction: Any, x: Any, sigma: Any) -> Any:
    match said.kind:
        case "velocity" | "epsilon":  # each is the derivative in its own noising
            return prediction
        case "x0":
            return (x - prediction) / sigma
        case "v":  # x0 = x / (sigma^2 + 1) - sigma v / sqrt(sigma^2 + 1)
            return x * sigma / (sigma**2 + 1) + prediction / (sigma**2 + 1) ** 0.5
    raise ValueError(f"no kind of prediction: {said.kind!r}")
