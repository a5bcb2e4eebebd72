"""What a training run begins from: the base model and the pictures.

Names, meanings and defaults of DiffSynth-Studio where it has the setting.
"""

from __future__ import annotations

from dataclasses import dataclass

from backend.schema.settings import knob


@dataclass(frozen=True)
class ModelSection:
    model: str = knob(
        "loft/starter",
        help=(
            "Base model: an id, a folder or a file. Not used where `model_paths` or `model_id_with_origin_paths` "
            "say it."
        ),
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
    processor_path: str | None = knob(
        None,
        help="Processor of the text encoder's pictures as `id:pattern` or a folder, for models that read pictures.",
        level="advanced",
    )
    fp8_models: str | None = knob(
        None,
        help=(
            "Frozen parts to keep in FP8, comma-separated: entries as in `model_paths` or `model_id_with_origin_paths`."
        ),
        label="FP8 models",
        level="advanced",
    )
    offload_models: str | None = knob(
        None,
        help="Frozen parts to keep in RAM and fetch block by block, comma-separated: entries as for `fp8_models`.",
        level="advanced",
    )
    quant_options: str | None = knob(
        None,
        help="Frozen parts to quantize, semicolon-separated `model:method[/layers left out]`, the model as for "
        "`fp8_models`. Methods: int8; "
        "bitsandbytes_nf4, _fp4, _int8, torchao_int8_w8a16, _fp8_w8a16, _nvfp4_w4a16 and comfy_kitchen_int8_w8a8, "
        "_fp8_w8a8 with those packages; for "
        "encoders also others of torchao.",
        label="Quantization",
        level="advanced",
    )
    zero_cond_t: bool = knob(
        False,
        help=(
            "Pictures to edit are taken as free of noise, as some models that edit want it. This is read from the "
            "model; said of another it is an error."
        ),
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
        help="csv, json or jsonl file with columns `image` and `prompt` (json: a prompt may be a list, one is "
        "drawn each "
        "time), for models that edit also `edit_image` (one picture; json: a list of several). Without it each "
        "picture's caption is the .txt file of the same name. Several, comma-separated.",
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
        ("image",),
        help="Metadata columns that name files; the first one present (`edit_image` aside) is the picture.",
        level="advanced",
    )
    extra_inputs: str | None = knob(
        None,
        help="Further columns of the metadata file that the run takes, comma-separated. For direct_distill: seed, "
        "rand_device, "
        "num_inference_steps, cfg_scale. A model that edits takes `edit_image` without being told.",
        level="advanced",
    )
    edit_pixels: int | None = knob(
        None,
        help="Area of the pictures that a model edits, as it is given them in training; without it the area it "
        "draws with, a million pixels for the "
        "published ones. Fewer save memory and time.",
        low=1024,
        high=2**26,
        unit="px",
        level="advanced",
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
    num_frames: int | None = knob(
        None,
        help="Frames of a video. Models of single pictures take 1 or nothing.",
        low=1,
        high=10**5,
        level="advanced",
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
    crops: int = knob(
        1,
        help=(
            "So many cuts of every picture are shown in turn: the middle, and others where its proportions, or "
            "`crop_zoom`, leave room."
        ),
        low=1,
        high=64,
        level="advanced",
    )
    crop_zoom: float = knob(
        1.0,
        help="How much smaller than the largest these cuts may be; never so small that they would have to be enlarged.",
        low=1.0,
        high=8.0,
        level="advanced",
    )
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
        help=(
            "Keep encodings that cannot change on disk, shared between runs. Off: they are computed for this run alone."
        ),
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
        help=(
            "So many pictures drawn by the untouched model are trained along, so that it keeps what it knows. 0: none."
        ),
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
