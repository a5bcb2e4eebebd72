"""What a model or a LoRA file turned out to be. Plain data, made from headers alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class TensorAt:
    """One stored tensor: which bytes of which file, and what they hold."""

    file: Path
    key: str  # its name in the file
    dtype: str  # as safetensors writes it: "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2", "U8", ...
    shape: tuple[int, ...]
    start: int  # absolute offset of the first byte in the file
    end: int
    swapped: bool = False  # the two halves of its rows are to change places
    packed: Packed | None = None  # how its numbers are made, where they are not simply stored

    @property
    def nbytes(self) -> int:
        """Bytes in the file: of every tensor that its numbers are made from."""
        if self.packed is not None:
            return sum(at.nbytes for _, at in self.packed.pieces)
        return self.end - self.start

    @property
    def pieces(self) -> tuple[TensorAt, ...]:
        """The stored tensors that its numbers are made from; itself, for a plain one."""
        return (self,) if self.packed is None else tuple(at for _, at in self.packed.pieces)


@dataclass(frozen=True)
class Packed:
    """A quantized weight: its form (`backend.catalog.quantization`), the stored tensors that it is made from, and the
    form's settings.

    `whole` is the shape of what is dequantized, `rows` which of its rows the tensor is (None: all).
    """

    form: str
    pieces: tuple[tuple[str, TensorAt], ...]  # role in the form -> where
    settings: tuple[tuple[str, object], ...] = ()
    whole: tuple[int, ...] = ()
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class PartSpec:
    """One network of a model (dit, text_encoder, vae): its class, sizes and where each of its parameters lies."""

    name: str
    network: str  # "package:Class"
    config: dict  # keyword arguments of the class
    tensors: dict[str, TensorAt]  # the module's own parameter name -> where
    scales: dict[str, TensorAt] = field(default_factory=dict)  # parameter name -> factor for scaled 8-bit storage
    storage: str = "bfloat16"  # dtype of most of its bytes, in torch's spelling
    folder: Path | None = None

    @property
    def nbytes(self) -> int:
        return sum(at.nbytes for at in self.tensors.values())

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted({piece.file for at in self.tensors.values() for piece in at.pieces}))


@dataclass(frozen=True)
class ModelSpec:
    """A model as found: its family and parts, what is missing, and why it was taken for this."""

    family: str
    title: str
    variant: str
    parts: dict[str, PartSpec]
    path: Path | None = None
    missing: tuple[str, ...] = ()  # parts needed to make pictures that were not found
    evidence: tuple[str, ...] = ()
    tokenizers: dict[str, Path] = field(default_factory=dict)  # name among the parts ("tokenizer_2") -> folder
    processor: Path | None = None  # of variants that look at pictures
    scheduler: dict = field(default_factory=dict)  # scheduler_config.json, or the family's default

    @property
    def tokenizer(self) -> Path | None:
        """The folder of the one that is called so."""
        return self.tokenizers.get("tokenizer")

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


@dataclass(frozen=True)
class LoraSpec:
    """A LoRA file as found, from its header."""

    path: Path
    family: str  # "" when it cannot be told
    dialect: str
    ranks: tuple[int, ...]  # the distinct ranks, ascending
    alphas: tuple[float, ...]
    targets: tuple[str, ...]  # kinds of module touched, e.g. "attn.to_q"
    num_modules: int
    algorithms: tuple[str, ...] = ("lora",)
    components: tuple[str, ...] = ("dit",)
    trigger_words: tuple[str, ...] = ()
    trainer: str = ""
    base: str = ""
    nbytes: int = 0
    modified: float = 0.0
    metadata: dict[str, str] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()
    families_possible: tuple[str, ...] = ()
