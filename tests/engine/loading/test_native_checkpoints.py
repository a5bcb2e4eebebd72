"""Checkpoints under their original project's names, fused and swapped, load as the same weights as those of diffusers."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import save_file

from backend import families
from backend.catalog.models.identify import identify_model
from backend.engine.loading import load
from tests.lora_models import shared

pytestmark = pytest.mark.torch
QKV, ADDED = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")


def swap(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat(tensor.chunk(2)[::-1])


def renamed(weights: dict, pairs: list[tuple[str, str]]) -> dict:
    """`weights` with the first pattern that matches replaced in each name."""
    out = {}
    for name, tensor in weights.items():
        for pattern, replacement in pairs:
            new, times = re.subn(pattern, replacement, name)
            if times:
                name = new
                break
        out[name] = tensor
    return out


def fuse(weights: dict, block: str, ours: tuple[str, ...], theirs: str) -> None:
    """Replaces the modules `ours` inside every `block` by one whose rows are theirs in turn."""
    for name in [key for key in weights if re.fullmatch(rf"{block}{re.escape(ours[0])}\.(weight|bias)", key)]:
        stem, leaf = name[: -len(f"{ours[0]}.") - len(name.rpartition(".")[2])], name.rpartition(".")[2]
        weights[f"{stem}{theirs}.{leaf}"] = torch.cat([weights.pop(f"{stem}{one}.{leaf}") for one in ours])


def native_flux(weights: dict) -> dict:
    weights = dict(weights)
    fuse(weights, r"transformer_blocks\.\d+\.attn\.", QKV, "IMG")
    fuse(weights, r"transformer_blocks\.\d+\.attn\.", ADDED, "TXT")
    fuse(weights, r"single_transformer_blocks\.\d+\.", ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"), "linear1")
    for leaf in ("weight", "bias"):
        weights[f"norm_out.linear.{leaf}"] = swap(weights[f"norm_out.linear.{leaf}"])
    single, double = r"^single_transformer_blocks\.(\d+)\.", r"^transformer_blocks\.(\d+)\."
    return renamed(
        weights,
        [
            (single + r"linear1", r"single_blocks.\1.linear1"),
            (single + r"proj_out", r"single_blocks.\1.linear2"),
            (single + r"norm\.linear", r"single_blocks.\1.modulation.lin"),
            (single + r"attn\.norm_q\.weight", r"single_blocks.\1.norm.query_norm.scale"),
            (single + r"attn\.norm_k\.weight", r"single_blocks.\1.norm.key_norm.scale"),
            (double + r"attn\.IMG", r"double_blocks.\1.img_attn.qkv"),
            (double + r"attn\.TXT", r"double_blocks.\1.txt_attn.qkv"),
            (double + r"attn\.to_out\.0", r"double_blocks.\1.img_attn.proj"),
            (double + r"attn\.to_add_out", r"double_blocks.\1.txt_attn.proj"),
            (double + r"attn\.norm_q\.weight", r"double_blocks.\1.img_attn.norm.query_norm.scale"),
            (double + r"attn\.norm_k\.weight", r"double_blocks.\1.img_attn.norm.key_norm.scale"),
            (double + r"attn\.norm_added_q\.weight", r"double_blocks.\1.txt_attn.norm.query_norm.scale"),
            (double + r"attn\.norm_added_k\.weight", r"double_blocks.\1.txt_attn.norm.key_norm.scale"),
            (double + r"ff\.net\.0\.proj", r"double_blocks.\1.img_mlp.0"),
            (double + r"ff\.net\.2", r"double_blocks.\1.img_mlp.2"),
            (double + r"ff_context\.net\.0\.proj", r"double_blocks.\1.txt_mlp.0"),
            (double + r"ff_context\.net\.2", r"double_blocks.\1.txt_mlp.2"),
            (double + r"norm1\.linear", r"double_blocks.\1.img_mod.lin"),
            (double + r"norm1_context\.linear", r"double_blocks.\1.txt_mod.lin"),
            (r"^x_embedder", "img_in"),
            (r"^context_embedder", "txt_in"),
            (r"^time_text_embed\.timestep_embedder\.linear_1", "time_in.in_layer"),
            (r"^time_text_embed\.timestep_embedder\.linear_2", "time_in.out_layer"),
            (r"^time_text_embed\.text_embedder\.linear_1", "vector_in.in_layer"),
            (r"^time_text_embed\.text_embedder\.linear_2", "vector_in.out_layer"),
            (r"^time_text_embed\.guidance_embedder\.linear_1", "guidance_in.in_layer"),
            (r"^time_text_embed\.guidance_embedder\.linear_2", "guidance_in.out_layer"),
            (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
            (r"^proj_out", "final_layer.linear"),
        ],
    )


def native_wan(weights: dict) -> dict:
    attention = []
    for ours, theirs in (("attn1", "self_attn"), ("attn2", "cross_attn")):
        for a, b in (
            ("to_q", "q"),
            ("to_k", "k"),
            ("to_v", "v"),
            (r"to_out\.0", "o"),
            ("norm_q", "norm_q"),
            ("norm_k", "norm_k"),
        ):
            attention.append((rf"\.{ours}\.{a}\.", f".{theirs}.{b}."))
    return renamed(
        weights,
        [
            *attention,
            (r"\.ffn\.net\.0\.proj\.", ".ffn.0."),
            (r"\.ffn\.net\.2\.", ".ffn.2."),
            (r"(blocks\.\d+)\.norm2\.", r"\1.norm3."),
            (r"(blocks\.\d+)\.scale_shift_table", r"\1.modulation"),
            (r"^scale_shift_table", "head.modulation"),
            (r"^proj_out", "head.head"),
            (r"^condition_embedder\.time_embedder\.linear_1", "time_embedding.0"),
            (r"^condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
            (r"^condition_embedder\.text_embedder\.linear_1", "text_embedding.0"),
            (r"^condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
            (r"^condition_embedder\.time_proj", "time_projection.1"),
        ],
    )


def native_sd3(weights: dict) -> dict:
    weights = dict(weights)
    fuse(weights, r"transformer_blocks\.\d+\.attn\.", QKV, "X")
    fuse(weights, r"transformer_blocks\.\d+\.attn2\.", QKV, "X2")
    fuse(weights, r"transformer_blocks\.\d+\.attn\.", ADDED, "C")
    for leaf in ("weight", "bias"):
        for name in (f"norm_out.linear.{leaf}", f"transformer_blocks.1.norm1_context.linear.{leaf}"):
            weights[name] = swap(weights[name])
    pairs = []
    for ours, theirs in (
        (r"attn\.X", "x_block.attn.qkv"),
        (r"attn2\.X2", "x_block.attn2.qkv"),
        (r"attn\.C", "context_block.attn.qkv"),
        (r"attn\.to_out\.0", "x_block.attn.proj"),
        (r"attn2\.to_out\.0", "x_block.attn2.proj"),
        (r"attn\.to_add_out", "context_block.attn.proj"),
        (r"attn\.norm_q", "x_block.attn.ln_q"),
        (r"attn\.norm_k", "x_block.attn.ln_k"),
        (r"attn2\.norm_q", "x_block.attn2.ln_q"),
        (r"attn2\.norm_k", "x_block.attn2.ln_k"),
        (r"attn\.norm_added_q", "context_block.attn.ln_q"),
        (r"attn\.norm_added_k", "context_block.attn.ln_k"),
        (r"ff\.net\.0\.proj", "x_block.mlp.fc1"),
        (r"ff\.net\.2", "x_block.mlp.fc2"),
        (r"ff_context\.net\.0\.proj", "context_block.mlp.fc1"),
        (r"ff_context\.net\.2", "context_block.mlp.fc2"),
        (r"norm1\.linear", "x_block.adaLN_modulation.1"),
        (r"norm1_context\.linear", "context_block.adaLN_modulation.1"),
    ):
        pairs.append((r"^transformer_blocks\.(\d+)\." + ours, r"joint_blocks.\1." + theirs))
    return renamed(
        weights,
        [
            *pairs,
            (r"^pos_embed\.proj", "x_embedder.proj"),
            (r"^pos_embed\.pos_embed", "pos_embed"),
            (r"^time_text_embed\.timestep_embedder\.linear_1", "t_embedder.mlp.0"),
            (r"^time_text_embed\.timestep_embedder\.linear_2", "t_embedder.mlp.2"),
            (r"^time_text_embed\.text_embedder\.linear_1", "y_embedder.mlp.0"),
            (r"^time_text_embed\.text_embedder\.linear_2", "y_embedder.mlp.2"),
            (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
            (r"^proj_out", "final_layer.linear"),
        ],
    )


def native_flux2(weights: dict) -> dict:
    weights = dict(weights)
    fuse(weights, r"transformer_blocks\.\d+\.attn\.", QKV, "IMG")
    fuse(weights, r"transformer_blocks\.\d+\.attn\.", ADDED, "TXT")
    weights["norm_out.linear.weight"] = swap(weights["norm_out.linear.weight"])
    single, double = r"^single_transformer_blocks\.(\d+)\.attn\.", r"^transformer_blocks\.(\d+)\."
    return renamed(
        weights,
        [
            (single + "to_qkv_mlp_proj", r"single_blocks.\1.linear1"),
            (single + "to_out", r"single_blocks.\1.linear2"),
            (single + r"norm_q\.weight", r"single_blocks.\1.norm.query_norm.scale"),
            (single + r"norm_k\.weight", r"single_blocks.\1.norm.key_norm.scale"),
            (double + r"attn\.IMG", r"double_blocks.\1.img_attn.qkv"),
            (double + r"attn\.TXT", r"double_blocks.\1.txt_attn.qkv"),
            (double + r"attn\.to_out\.0", r"double_blocks.\1.img_attn.proj"),
            (double + r"attn\.to_add_out", r"double_blocks.\1.txt_attn.proj"),
            (double + r"attn\.norm_q\.weight", r"double_blocks.\1.img_attn.norm.query_norm.scale"),
            (double + r"attn\.norm_k\.weight", r"double_blocks.\1.img_attn.norm.key_norm.scale"),
            (double + r"attn\.norm_added_q\.weight", r"double_blocks.\1.txt_attn.norm.query_norm.scale"),
            (double + r"attn\.norm_added_k\.weight", r"double_blocks.\1.txt_attn.norm.key_norm.scale"),
            (double + r"ff\.linear_in", r"double_blocks.\1.img_mlp.0"),
            (double + r"ff\.linear_out", r"double_blocks.\1.img_mlp.2"),
            (double + r"ff_context\.linear_in", r"double_blocks.\1.txt_mlp.0"),
            (double + r"ff_context\.linear_out", r"double_blocks.\1.txt_mlp.2"),
            (r"^(\w+_stream_modulation\w*)\.linear", r"\1.lin"),
            (r"^time_guidance_embed\.timestep_embedder\.linear_1", "time_in.in_layer"),
            (r"^time_guidance_embed\.timestep_embedder\.linear_2", "time_in.out_layer"),
            (r"^time_guidance_embed\.guidance_embedder\.linear_1", "guidance_in.in_layer"),
            (r"^time_guidance_embed\.guidance_embedder\.linear_2", "guidance_in.out_layer"),
            (r"^x_embedder", "img_in"),
            (r"^context_embedder", "txt_in"),
            (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
            (r"^proj_out", "final_layer.linear"),
        ],
    )


NATIVE = {"tiny_flux": native_flux, "flux2": native_flux2, "wan": native_wan, "sd3": native_sd3}


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("name", NATIVE)
def test_native_checkpoints(name, prefix, tmp_path):
    weights = shared(name).state_dict()
    native = NATIVE[name](weights)
    assert not any("transformer_blocks" in key or key.startswith("proj_out") for key in native)
    save_file({prefix + key: tensor.contiguous().clone() for key, tensor in native.items()}, tmp_path / "m.safetensors")
    spec = identify_model(tmp_path / "m.safetensors", families.FAMILIES)
    assert spec.family == {"tiny_flux": "flux"}.get(name, name)
    part = spec.parts["dit"]
    loaded = load.load_part(part).state_dict()
    assert set(loaded) == set(weights)
    for key, tensor in weights.items():
        assert torch.equal(loaded[key], tensor), key
    assert all(torch.equal(load.read_tensor(part.tensors[key]), tensor) for key, tensor in weights.items())
