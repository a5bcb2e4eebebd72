"""The starter's tokenizer and text encoder: a small vocabulary, then a warm-up that ties captions to pictures.

Without the warm-up the transformer learns to paint averages long before it reads: a fresh text encoder's states hardly
differ between captions. So its chat-suffix tokens first learn to predict, linearly, what the caption's picture looks
like.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import DynamicCache, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from backend.schema.messages import Trouble

VOCABULARY = 2048
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PREFIX_TOKENS, EDIT_PREFIX_TOKENS, SUFFIX_TOKENS = 34, 64, 5


def templates() -> tuple[str, str]:
    """The chat templates of the stock text-to-image and edit pipelines, read from the pipelines themselves."""
    import inspect

    from diffusers import QwenImageEditPipeline, QwenImagePipeline

    found = []
    for pipeline in (QwenImagePipeline, QwenImageEditPipeline):
        for line in inspect.getsource(pipeline.__init__).splitlines():
            if "prompt_template_encode = " in line:
                found.append(json.loads(line.split(" = ", 1)[1]))
    return found[0], found[1]


def make_tokenizer(captions: list[str], folder: Path) -> Qwen2Tokenizer:
    """Byte-level BPE in which both templates' fixed beginnings are as many tokens as in Qwen's own vocabulary."""
    plain = list(templates())
    for token in SPECIAL:
        plain = [text.replace(token, "\n") for text in plain]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL), show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(captions + plain * 2000, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    wrapped = Qwen2Tokenizer(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[0],
        unk_token=SPECIAL[0],
        extra_special_tokens=list(SPECIAL[1:]),
        model_max_length=1024,
    )
    wrapped.save_pretrained(folder)
    loaded = Qwen2Tokenizer.from_pretrained(folder)
    check_prefixes(loaded)
    return loaded


def check_prefixes(tokenizer: Qwen2Tokenizer) -> None:
    """The stock pipelines cut a fixed number of tokens; it must be the template's beginning, no more and no less."""
    for template, expected in zip(templates(), (PREFIX_TOKENS, EDIT_PREFIX_TOKENS), strict=True):
        found = len(tokenizer(template.split("{}")[0].split("<|vision_start|>")[0]).input_ids)
        if found != expected:
            raise Trouble("tokenizer", f"The template's beginning is {found} tokens and must be {expected}.")


def make_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    config = Qwen2_5_VLConfig(
        text_config=dict(
            hidden_size=192,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            intermediate_size=512,
            vocab_size=VOCABULARY,
            max_position_embeddings=2048,
            rope_parameters=rope,
            pad_token_id=ids["<|endoftext|>"],
            eos_token_id=ids["<|im_end|>"],
            bos_token_id=None,
        ),
        vision_config=dict(
            depth=1,
            hidden_size=32,
            intermediate_size=64,
            num_heads=2,
            out_hidden_size=192,
            fullatt_block_indexes=[0],
            in_channels=3,
            patch_size=14,
        ),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen2_5_VLForConditionalGeneration(config)


def features(dataset: Path, lines: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    """What a picture looks like in 5 x 96 numbers: principal components of its quadrants and of its half-size whole.

    Returns them ``[pictures, 5, 96]`` and, for each line, the picture's row. Components keep part of their scale, so
    that the coarse ones count more than the fine.
    """
    names = sorted({line["image"] for line in lines})
    row = {name: i for i, name in enumerate(names)}
    views = np.empty((len(names), 5, 32, 32, 3), np.uint8)
    for i, name in enumerate(names):
        half = Image.open(dataset / name).convert("RGB").resize((64, 64), Image.Resampling.BOX)
        whole = np.asarray(half)
        quadrants = [whole[y : y + 32, x : x + 32] for y in (0, 32) for x in (0, 32)]
        views[i] = np.stack([*quadrants, np.asarray(half.resize((32, 32), Image.Resampling.BOX))])
    flat = torch.from_numpy(views.reshape(len(names), 5, -1)).float().div_(127.5).sub_(1)
    torch.manual_seed(0)
    targets = []
    for view in range(5):
        x = flat[:, view] - flat[:, view].mean(0)
        _, scale, basis = torch.pca_lowrank(x[torch.randperm(len(x))[:3000]], q=96, niter=2)
        y = (x @ basis) / scale.sqrt()
        targets.append(y / y.std())
    return torch.stack(targets, 1), torch.tensor([row[line["image"]] for line in lines])


def hidden_states(
    encoder: Qwen2_5_VLForConditionalGeneration, prefix: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Last states of the tokens after the template's beginning, ``[batch, tokens, hidden]``.

    The beginning (``prefix``, ``[1, 34]``) is the same for every prompt and attention is causal, so it runs once for
    the whole batch; gradients reach it through the shared keys and values.
    """
    model, (rows, length), start = encoder.model.language_model, ids.shape, prefix.shape[1]
    cache = DynamicCache()
    at = torch.arange(start + length)
    model(input_ids=prefix, position_ids=at[:start].expand(3, 1, -1), cache=cache, use_cache=True)
    cache.batch_repeat_interleave(rows)
    whole = torch.cat([torch.ones(rows, start, dtype=mask.dtype), mask], 1)
    return model(
        input_ids=ids, attention_mask=whole, position_ids=at[start:].expand(3, rows, -1), cache=cache, use_cache=True
    ).last_hidden_state


def suffix_states(
    encoder: Qwen2_5_VLForConditionalGeneration, tokenizer: Qwen2Tokenizer, texts: list[str]
) -> torch.Tensor:
    """States of the five tokens after the prompt, ``[batch, 5, hidden]``."""
    beginning, ending = templates()[0].split("{}")
    prefix = torch.tensor([tokenizer(beginning).input_ids])
    batch = tokenizer([text + ending for text in texts], padding=True, return_tensors="pt")
    out = hidden_states(encoder, prefix, batch.input_ids, batch.attention_mask)
    at = batch.attention_mask.sum(1)[:, None] - SUFFIX_TOKENS + torch.arange(SUFFIX_TOKENS)
    return out.gather(1, at[..., None].expand(-1, -1, out.shape[-1]))


def optimisers(encoder: torch.nn.Module, head: torch.nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in encoder.named_parameters() if p.ndim == 2 and "layers." in n and "visual" not in n]
    chosen = {id(p) for p in matrices}
    rest = [p for n, p in encoder.named_parameters() if id(p) not in chosen and "visual" not in n]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([*rest, *head.parameters()], lr=rate, betas=(0.9, 0.99), weight_decay=0.0),
    ]


def warm_up(
    dataset: Path, folder: Path, *, minutes: float, batch: int = 96, rate: float = 3e-3, more: bool = False
) -> float:
    """Train tokenizer and encoder into ``folder``; returns the last smoothed error (1 is as good as the mean picture).

    ``more`` goes on from the encoder that is there.
    """
    lines = [json.loads(line) for line in (dataset / "metadata.jsonl").read_text("utf-8").splitlines()]
    tokenizer = make_tokenizer([text for line in lines for text in line["prompt"]], folder / "tokenizer")
    encoder = make_encoder(tokenizer)
    if more:
        encoder = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "text_encoder", dtype=torch.float32)
    head = torch.nn.ModuleList([torch.nn.Linear(192, 96) for _ in range(SUFFIX_TOKENS)])
    targets, rows = features(dataset, lines)
    rng = np.random.default_rng(0)
    steppers = optimisers(encoder, head, rate)
    began, step, seen = time.monotonic(), 0, 1.0
    while (passed := (time.monotonic() - began) / 60 / minutes) < 1:
        chosen = rng.integers(len(lines), size=batch)
        texts = [str(rng.choice(lines[i]["prompt"])) for i in chosen]
        with torch.autocast("cpu", torch.bfloat16):
            states = suffix_states(encoder, tokenizer, texts)
            guess = torch.stack([layer(states[:, i]) for i, layer in enumerate(head)], 1)
        loss = torch.nn.functional.mse_loss(guess.float(), targets[rows[chosen]])
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*encoder.parameters(), *head.parameters()], 1.0)
        for stepper in steppers:
            for group in stepper.param_groups:
                group["lr"] = rate * min(1, (step + 1) / 50) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * passed)))
            stepper.step()
            stepper.zero_grad()
        step += 1
        seen += (loss.item() - seen) * max(0.02, 1 / step)
        if step % 50 == 0:
            print(
                json.dumps({"step": step, "seconds": round(time.monotonic() - began), "error": round(seen, 4)}),
                flush=True,
            )
    encoder.to(torch.bfloat16).save_pretrained(folder / "text_encoder")
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--more", action="store_true", help="go on from the encoder in OUT")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        json.dumps(
            {"error": round(warm_up(options.dataset, options.out, minutes=options.minutes, more=options.more), 4)}
        )
    )


if __name__ == "__main__":
    main()
