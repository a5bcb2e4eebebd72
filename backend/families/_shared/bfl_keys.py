"""What the two FLUX families have in common: how their original names the double blocks and both ends, and which
layers stay precise."""

from __future__ import annotations

from backend.catalog.family import Part, Rule

DOUBLE, SINGLE = "transformer_blocks.{}.", "single_transformer_blocks.{}."
LEAF = {"scale": "weight"}  # of a norm
STREAMS = (("img", ("to_{}", "to_out.0", "norm_{}")), ("txt", ("add_{}_proj", "to_add_out", "norm_added_{}")))


def denoiser(network: str, embedder: str) -> Part:
    """The transformer; `embedder` is the module that takes time and guidance in."""
    return Part(
        network=network,
        folder="transformer",
        phase="denoise",
        blocks=("transformer_blocks", "single_transformer_blocks"),
        prefixes=("model.diffusion_model.", "diffusion_model.", "transformer.", "model."),
        keep_precise=("norm", "pos_embed", "x_embedder", "context_embedder", embedder, "proj_out"),
    )


def double_blocks() -> tuple[Rule, ...]:
    """Attention and norms of both streams. Some trainers number the parts of the fused projection (`qkv.0`)."""
    rules = []
    for stream, (projection, out, norm) in STREAMS:
        theirs = f"double_blocks.{{}}.{stream}_attn."
        ours = [DOUBLE + "attn." + projection.format(letter) for letter in "qkv"]
        rules.append(Rule(theirs + "qkv", tuple(ours)))
        rules += [Rule(f"{theirs}qkv.{place}", (name,)) for place, name in enumerate(ours)]
        rules.append(Rule(theirs + "proj", (DOUBLE + "attn." + out,)))
        rules += [
            Rule(f"{theirs}norm.{long}_norm", (DOUBLE + "attn." + norm.format(short),), leaf=LEAF)
            for long, short in (("query", "q"), ("key", "k"))
        ]
    return tuple(rules)


def single_norms() -> tuple[Rule, ...]:
    return tuple(
        Rule(f"single_blocks.{{}}.norm.{long}_norm", (f"{SINGLE}attn.norm_{short}",), leaf=LEAF)
        for long, short in (("query", "q"), ("key", "k"))
    )


def embedders(module: str, names: dict[str, str]) -> tuple[Rule, ...]:
    """Two linear layers each: their name -> ours, inside of `module`."""
    return tuple(
        Rule(f"{theirs}.{end}", (f"{module}.{ours}_embedder.linear_{number}",))
        for theirs, ours in names.items()
        for number, end in ((1, "in_layer"), (2, "out_layer"))
    )


ENDS = (
    Rule("img_in", ("x_embedder",)),
    Rule("txt_in", ("context_embedder",)),
    Rule("final_layer.linear", ("proj_out",)),
    Rule("final_layer.adaLN_modulation.1", ("norm_out.linear",), swap_halves=True),
)
