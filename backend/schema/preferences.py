"""What a person sets once."""

from __future__ import annotations

from dataclasses import dataclass

from backend.schema.settings import knob


@dataclass(frozen=True)
class Preferences:
    """Read from `user/preferences.json`; every field has an effect at the next start of a worker or at once."""

    model_folders: tuple[str, ...] = knob((), help="Further folders with models, one per line.", lines=3)
    lora_folders: tuple[str, ...] = knob((), help="Further folders with LoRA files, one per line.", lines=3)
    reserve_gib: float = knob(
        0.6,
        help="Video memory kept free for the desktop and other programs.",
        low=0.0,
        high=64.0,
        unit="GiB",
        label="Memory reserve",
    )
    download_source: str = knob(
        "modelscope", help="Where missing model files come from.", choices=("modelscope", "huggingface")
    )
    offline: bool = knob(False, help="Never download; say what is missing instead.")
    allow_fp8: bool = knob(
        True,
        help=(
            "Weights may be stored in FP8, by the plan or where memory runs out (half the memory, slightly "
            "different pictures)."
        ),
    )
    allow_tiles: bool = knob(
        True,
        help="A picture may be decoded in tiles, by the plan or where memory runs out (less memory, blended seams).",
    )
    allow_8bit_optimizer: bool = knob(
        True,
        help="The plan of a training run may keep AdamW's moments in 8 bits (slightly different weights).",
        label="Allow 8-bit optimizer",
    )
    largest_model_upload_gib: float = knob(
        2.0,
        help="Largest LoRA or model file that the page takes.",
        low=0.001,
        high=1024.0,
        unit="GiB",
        label="Largest upload of a model",
    )
    largest_picture_upload_mib: float = knob(
        64.0,
        help="Largest picture, caption or other file that the page takes.",
        low=0.001,
        high=65536.0,
        unit="MiB",
        label="Largest upload of a picture",
    )
    device: str = knob("auto", help="Device that computes: auto, cpu, cuda:0, mps, xpu:0 …")
    theme: str = knob("system", help="Light, dark, or as the system says.", choices=("system", "light", "dark"))
