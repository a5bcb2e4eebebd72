"""What a family says about itself in data: parts, signatures, name maps, LoRA targets, defaults. No torch.

A family is a module of `backend/families` with these names:

    NAME: str                           short word for programs, the same as the module's name
    TITLE: str                          for people
    PARTS: dict[str, Part]              attribute name of a pipeline ("dit", "text_encoder", "vae") -> what it is
    SIGNATURES: tuple[Signature, ...]   how its files are known, one per variant of a part
    NAME_MAPS: tuple[NameMap, ...]      other spellings of its module names, for checkpoints and LoRA files alike
    LORA: LoraTargets
    DEFAULTS: Defaults
    SCHEDULER: dict                     scheduler_config.json where a model brings none
    SIZES: SizeRule
    TRAINING_SCHEDULE: TrainingSchedule (of families that train) noise levels that a run practises where it says nothing else

and, unless it is only a set of name maps, the functions that `docs/architecture.md` lists. Two functions may be absent:

    config_from_shapes(part, shapes) -> dict      the class's keyword arguments where no config.json lies beside the file;
                                                  `shapes` parameter name -> shape
    derived_maps(part, modules) -> tuple[NameMap, ...]   dialects that depend on how many modules there are
    config_from_lora(widths) -> dict              keyword arguments of the class that a LoRA's (module, input width, rows) show

    LORA_SIGNS: tuple[LoraSign, ...]              (may be absent) how LoRA files for it are known
    LORA_NAMES: dict[str, str]                    (may be absent) layout -> the dialect its files are named in, if not the first
    tell_variant(variant, class_name, config, path) -> tuple[str, str, str] | None      a variant that a transformer's tensors do not show: its
                                                  name, its title, and by what; from model_index.json, config and place of the file
    VARIANT_CONFIG: dict[str, dict]               (may be absent) variant -> keyword arguments of the transformer's class that it needs
    WHOLE_CONFIG: dict                            (may be absent) keyword arguments by which the class has the modules of all variants
"""

from __future__ import annotations

from dataclasses import dataclass, field


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


@dataclass(frozen=True)
class TrainingSchedule:
    """The noise levels that a family is trained at, as DiffSynth-Studio's `FlowMatchScheduler` sets them for training.

    Even levels from 1 down, each shifted to `shift` * s / (1 + (`shift` - 1) * s), then stretched towards 0 so that the last is `terminal`
    (None: as they are). An exponential shift by mu is `shift` = e^mu.
    """

    shift: float
    terminal: float | None = None


@dataclass(frozen=True)
class Defaults:
    """What differs from the general defaults: fields of `GenerationRequest` and knobs of `TrainingConfig` by name."""

    request: dict[str, object] = field(default_factory=dict)
    training: dict[str, object] = field(default_factory=dict)
