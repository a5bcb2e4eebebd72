"""What Qwen-Image is told: prompts, and for edit variants the pictures that go with them, through Qwen2.5-VL. Shapes as in `qwen_image`."""

from __future__ import annotations

from pathlib import Path

from backend.families._shared import tokenizers
from backend.families.qwen_image import reference_images
from backend.families.qwen_image.prompt_template import (
    EDIT_PREFIX_TOKENS,
    EDIT_TEMPLATE,
    IMAGE_TOKEN,
    MAX_EDIT_TOKENS,
    MAX_TOKENS,
    PREFIX_TOKENS,
    TEMPLATE,
    shown_words,
)
from backend.schema.messages import Trouble


def load_tokenizer(folder: Path, name: str = "tokenizer"):
    """The tokenizer in `folder`. Raises Trouble("missing_file") where there is none."""
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    return tokenizers.load_from(folder, Qwen2Tokenizer)


def encode_text(
    parts: dict, prompts, *, device=None, pictures=None, variant: str = "", negative: bool = False
) -> list[dict]:
    """One encoding per prompt: {"embeds": (L, D)} on `device`. Needs `text_encoder` and `tokenizer`. Differentiable.

    `pictures`: of an edit variant, per prompt a tuple of PIL pictures (or nothing, for a prompt that stands alone); then also `vision`
    and `processor` are needed. Embeds then hold the pictures' tokens too. Raises Trouble for several pictures where one is understood.
    """
    import torch

    tokenizer, encoder = parts["tokenizer"], parts["text_encoder"]
    device = device or next(encoder.parameters()).device
    if pictures is not None and any(pictures):
        return _encode_with_pictures(parts, prompts, [tuple(some or ()) for some in pictures], device)
    limit = MAX_TOKENS + PREFIX_TOKENS
    rows = [_tokens(tokenizer, TEMPLATE.format(prompt), limit) for prompt in prompts]
    ids, mask = _side_by_side(rows, device)
    if len(rows) > 1 and torch.is_grad_enabled():
        states = _states_after_shared_start(encoder, ids, mask)
    else:
        states = encoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, PREFIX_TOKENS:]
    return [{"embeds": states[i, : len(row) - PREFIX_TOKENS]} for i, row in enumerate(rows)]


def _tokens(tokenizer, text: str, limit: int) -> list[int]:
    text = text.encode("utf-8", "replace").decode()  # half of an emoji that was cut in two is no text to the tokenizer
    return tokenizer(text, truncation=True, max_length=limit)["input_ids"]


def truncated(parts: dict, prompt: str, encoding: dict, pictures=()) -> int | None:
    """How many tokens of the prompt's words were read, where the encoding is as long as it may be."""
    most = MAX_EDIT_TOKENS if pictures else MAX_TOKENS
    seen = 0
    if pictures:
        _, grids = reference_images.patches_of(parts["processor"], pictures)
        seen = sum(reference_images.num_tokens(grid, parts["processor"].images.merge_size) for grid in grids)
    return most if len(encoding["embeds"]) >= most + seen else None


def _side_by_side(rows: list[list[int]], device):
    """Token rows padded on the right: ids and mask (B, L)."""
    import torch

    longest = max(len(row) for row in rows)
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
    return ids, mask


def _states_after_shared_start(encoder, ids, mask):
    """Last states after the template's start, which runs once for the whole batch: in training most tokens are these.

    Attention is causal, so the numbers are those of the plain call, and gradients reach the start through its keys and values.
    """
    import torch
    from transformers import DynamicCache

    places = torch.arange(ids.shape[1], device=ids.device)
    start, cache = places[:PREFIX_TOKENS], DynamicCache()
    encoder(input_ids=ids[:1, :PREFIX_TOKENS], position_ids=start[None], cache=cache, use_cache=True)
    cache.batch_repeat_interleave(ids.shape[0])
    return encoder(
        input_ids=ids[:, PREFIX_TOKENS:],
        attention_mask=mask,
        position_ids=places[None, PREFIX_TOKENS:].expand(ids.shape[0], -1),
        cache=cache,
        use_cache=True,
    ).last_hidden_state


def _encode_with_pictures(parts: dict, prompts: list[str], pictures: list[tuple], device) -> list[dict]:
    """As Qwen2.5-VL was trained: a picture's features stand in the places of its tokens, and positions are three-dimensional.

    diffusers leaves it to transformers to find those positions. transformers 5 wants to be told which tokens are pictures' for it
    and else numbers all tokens through, without a word; this is what earlier ones, and the model's own code, compute.
    """
    import torch

    for name in ("vision", "processor"):
        if parts.get(name) is None:
            hint = "It lies in the text encoder's files." if name == "vision" else "Add the model's folder `processor`."
            raise Trouble("missing_part", f"Pictures to edit need the {name}, which was not loaded.", hint=hint)
    merge = parts["processor"].images.merge_size
    features, grids = _seen(parts, [picture for some in pictures for picture in some], device)
    left = iter(grids)
    own_grids = [[next(left) for _ in some] for some in pictures]
    rows, starts = zip(*[_edit_row(parts, *one, merge) for one in zip(prompts, own_grids, strict=True)], strict=True)
    ids, mask = _side_by_side(list(rows), device)
    is_picture = ids == parts["tokenizer"].convert_tokens_to_ids(IMAGE_TOKEN)
    positions = torch.zeros((3, *ids.shape), dtype=torch.long)
    for index, (row, grids_of_row) in enumerate(zip(is_picture.tolist(), own_grids, strict=True)):
        length = len(rows[index])
        positions[:, index, :length] = reference_images.positions_of(row[:length], grids_of_row, merge)
    embeds = parts["text_encoder"].embed_tokens(ids)
    embeds = embeds.masked_scatter(is_picture[..., None], features.to(embeds))
    del features  # a run of the language half is the most that memory holds here
    states = parts["text_encoder"](
        inputs_embeds=embeds, attention_mask=mask, position_ids=positions.to(device), use_cache=False
    ).last_hidden_state
    return [{"embeds": states[i, starts[i] : len(row)]} for i, row in enumerate(rows)]


def _seen(parts: dict, pictures: list, device) -> tuple:
    """What the vision tower makes of `pictures`, one after the other in one tensor (tokens, D), and their grids of patches."""
    patches, grids = reference_images.patches_of(parts["processor"], pictures)
    patches = patches.to(next(parts["vision"].parameters()).dtype).to(device)  # half the bytes on the way
    return parts["vision"](patches, grid_thw=grids.to(device)).pooler_output, grids.tolist()


def _edit_row(parts: dict, prompt: str, grids: list, merge: int) -> tuple[list[int], int]:
    """Token ids of a prompt with its pictures, and how many of them are the template's start."""
    tokenizer, processor = parts["tokenizer"], parts["processor"]
    if IMAGE_TOKEN in prompt:
        sentence = f"The prompt holds {IMAGE_TOKEN}, which stands for a picture."
        raise Trouble("bad_value", sentence, hint="Speak of “Picture 1” instead.")
    if not grids:
        limit = MAX_TOKENS + PREFIX_TOKENS
        return _tokens(tokenizer, TEMPLATE.format(prompt), limit), PREFIX_TOKENS
    if len(grids) > 1 and not processor.plus:
        raise Trouble(
            "bad_value",
            f"Qwen-Image-Edit works from one picture, and {len(grids)} were given.",
            hint="Give one, or choose Qwen-Image-Edit-2509 or a later one.",
        )
    counts = [reference_images.num_tokens(grid, merge) for grid in grids]
    shown = shown_words([IMAGE_TOKEN * count for count in counts], plus=processor.plus)
    limit = EDIT_PREFIX_TOKENS + sum(counts) + MAX_EDIT_TOKENS
    text = EDIT_TEMPLATE.format(shown + prompt)
    return _tokens(tokenizer, text, limit), EDIT_PREFIX_TOKENS
