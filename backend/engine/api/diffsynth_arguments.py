"""Words that scripts for DiffSynth-Studio carry and that mean nothing here, or something else: each with the sentence
that says what to do.

What means the same here is a parameter of the Python API itself; nothing that was asked for is passed over in silence.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from backend.schema.messages import Trouble

_NOT_YET = "Pictures are drawn from text, input_image and edit_image; {} is not supported."
CALL = {  # word -> (values that ask for nothing, sentence)
    "inpaint_mask": ((None,), _NOT_YET),
    "inpaint_blur_size": ((None,), _NOT_YET),
    "inpaint_blur_sigma": ((None,), _NOT_YET),
    "blockwise_controlnet_inputs": ((None,), _NOT_YET),
    "eligen_entity_prompts": ((None,), _NOT_YET),
    "eligen_entity_masks": ((None,), _NOT_YET),
    "eligen_enable_on_negative": ((False,), _NOT_YET),
    "edit_image_auto_resize": (
        (True,),
        "{} is on: the model is given pictures of about a million pixels, as those it was trained with.",
    ),
    "edit_rope_interpolation": ((False,), _NOT_YET),
    "zero_cond_t": ((False,), "{} is read from the model's config.json."),
    "kv_cache": ((None,), "{} is not supported; step_cache reuses steps."),
    "negative_kv_cache": ((None,), "{} is not supported; step_cache reuses steps."),
    "layer_input_image": ((None,), _NOT_YET),
    "layer_num": ((None,), _NOT_YET),
    "context_image": ((None,), _NOT_YET),
}
COMPILE = {
    "mode": (
        ("default", None),
        "{} is torch's default here: other modes keep addresses of weights, which move while they are streamed.",
    ),
    "dynamic": ((True, None), "{} is on: one graph serves all sizes."),
    "fullgraph": ((False, None), "{} is off: a LoRA that cannot be traced is computed beside the graph."),
    "compile_models": (
        (None, ["dit"], ("dit",)),
        "{}: only the repeated block of dit is compiled, where nearly all the time goes.",
    ),
}


def refuse(given: Mapping[str, object], words: Mapping[str, tuple], own: Iterable[str], *, what: str) -> None:
    """Raises Trouble for a word in `given` that asks for something that is not done, or that nobody knows; `own` are
    Loft's."""
    for name, value in given.items():
        if name not in words:
            near = difflib.get_close_matches(name, [*own, *words], 1)
            hint = f"Did you mean {near[0]}?" if near else f"It takes {', '.join(own)}."
            raise Trouble("bad_value", f"{what} has no setting {name!r}.", hint=hint)
        harmless, sentence = words[name]
        if not any(value is one or (type(value) is type(one) and value == one) for one in harmless):
            raise Trouble("not_supported", sentence.format(name), hint=f"Leave {name} out.")


def tiles(size: int | None, stride: int | None) -> tuple[int, int]:
    """Tiles of `size` latent cells, `stride` apart, as DiffSynth counts them: half a tile where only the size is
    given."""
    size = size or 2 * (stride or 0)
    stride = stride or size // 2
    if not 0 < stride <= size:
        raise Trouble(
            "bad_value", f"tile_stride is {stride} and tile_size {size}.", hint="Take a stride from 1 to the size."
        )
    return size, stride
