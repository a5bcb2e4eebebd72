"""LoRA files converted, merged, resized, extracted, baked and measured: what is written is what was meant, or nothing is written."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from backend.catalog.formats.safetensors import read_layout
from backend.catalog.lora import block_norms
from backend.engine.lora import adapters
from backend.engine.lora.tools import command_line
from backend.engine.lora.tools.commands import TOOLS, run_tool
from backend.schema.messages import Cancelled, Trouble
from tests.lora_models import CASES, assert_changed_by, build, same, saved, shared, snapshot

pytestmark = pytest.mark.torch
LAYOUTS = ("diffusers", "comfyui", "kohya")
QWEN, FLUX = CASES / "models" / "tiny_qwen_image", CASES / "models" / "tiny_flux"


def change(model: str, path) -> dict[str, torch.Tensor]:
    """What a file does to a tiny model, by loading it as any user would."""
    module = shared(model)
    before = snapshot(module)
    adapters.load(module, path, hot=False)
    after = module.state_dict()
    found = {k: after[k].double() - before[k].double() for k in before if not torch.equal(after[k], before[k])}
    adapters.clear(module)
    assert same(module, before)
    return found


def metadata(path) -> dict[str, str]:
    return read_layout(path).metadata


ROUND = [
    ("tiny_flux", "flux_kohya_fused"),
    ("tiny_flux", "flux_kohya_linear1"),
    ("tiny_flux", "flux_peft_with_alpha"),
    ("tiny_flux", "flux_onetrainer_attn"),
    ("tiny_qwen_image", "qwen_per_module_alpha"),
    ("tiny_qwen_image", "qwen_bf16_odd_scale"),
    ("tiny_qwen_image", "qwen_metadata_alpha"),
    ("tiny_qwen_image", "qwen_dora_out"),
    ("tiny_unet", "unet_conv3x3"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("model", "case"), ROUND)
def test_converted_there_and_back(model, case, layout, tmp_path):
    expected = load_file(CASES / f"{case}.expected.safetensors")
    family = {"tiny_unet": "sd15", "tiny_qwen_image": "qwen_image", "tiny_flux": "flux"}[model]
    path = CASES / f"{case}.safetensors"
    base = {"base": str(saved(model, tmp_path / "base"))} if model == "tiny_unet" else {}  # of an unusual depth
    for step, target in enumerate((layout, "diffusers", layout)):
        out = tmp_path / f"{step}.safetensors"
        values = {"path": str(path), "out": str(out), "layout": target, "family": family, **base}
        answer = run_tool({"tool": "convert", **values})
        assert answer["worst"] <= 1e-5 and not answer["unused"]
        path = out
    module = shared(model)
    before = snapshot(module)
    adapters.load(module, path, hot=False)
    try:
        assert_changed_by(module, before, expected, 2e-5)
    finally:
        adapters.clear(module)
    with safe_open(path, "pt") as file:
        keys = list(file.keys())
    alphas = [key for key in keys if key.endswith(".alpha")]
    assert bool(alphas) == (layout != "diffusers") and metadata(path)["loft.layout"] == layout
    assert all(
        key.startswith(
            {"diffusers": ("transformer.", "unet."), "comfyui": "diffusion_model.", "kohya": "lora_unet_"}[layout]
        )
        for key in keys
    )


@pytest.mark.parametrize("layout", ["comfyui", "kohya"])
@pytest.mark.parametrize("case", ["qwen_loha", "qwen_lokr_whole", "qwen_dora_in", "qwen_full_diff"])
def test_other_algorithms_keep_their_form(case, layout, tmp_path):
    run_tool(
        {
            "tool": "convert",
            "path": str(CASES / f"{case}.safetensors"),
            "out": str(tmp_path / "a.safetensors"),
            "layout": layout,
            "family": "qwen_image",
        }
    )
    expected, got = (
        load_file(CASES / f"{case}.expected.safetensors"),
        change("tiny_qwen_image", tmp_path / "a.safetensors"),
    )
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        assert float((got[name] - tensor.double()).abs().max()) <= 2e-5 * float(tensor.abs().max()), name


@pytest.mark.parametrize("case", ["qwen_loha", "qwen_lokr_whole", "qwen_dora_in", "qwen_full_diff"])
def test_what_a_layout_has_no_form_for_is_refused(case, tmp_path):
    with pytest.raises(Trouble, match=r"form|cannot"):
        run_tool(
            {
                "tool": "convert",
                "path": str(CASES / f"{case}.safetensors"),
                "out": str(tmp_path / "a.safetensors"),
                "layout": "diffusers",
                "family": "qwen_image",
            }
        )
    assert list(tmp_path.iterdir()) == []


def pairs(
    stems: dict[str, tuple[int, int]], rank: int, seed: int, alpha: float | None = None
) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for stem, (rows, columns) in stems.items():
        tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, columns, generator=random) * 0.2
        tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, rank, generator=random) * 0.2
        if alpha is not None:
            tensors[f"{stem}.alpha"] = torch.tensor(alpha)
    return tensors


def test_separate_projections_are_fused_with_what_is_missing_as_zeros(tmp_path):
    """q of rank 2 and mlp of rank 3 at other scales, k and v absent: one projection of rank 5."""
    single = "transformer.single_transformer_blocks.0."
    file = {**pairs({single + "attn.to_q": (32, 32)}, 2, 0, 1.0), **pairs({single + "proj_mlp": (128, 32)}, 3, 1, 6.0)}
    save_file(file, tmp_path / "a.safetensors")
    run_tool(
        {
            "tool": "convert",
            "path": str(tmp_path / "a.safetensors"),
            "out": str(tmp_path / "b.safetensors"),
            "layout": "kohya",
        }
    )
    written = load_file(tmp_path / "b.safetensors")
    assert set(written) == {
        f"lora_unet_single_blocks_0_linear1.{name}" for name in ("lora_down.weight", "lora_up.weight", "alpha")
    }
    assert written["lora_unet_single_blocks_0_linear1.lora_up.weight"].shape == (224, 5)
    before, after = change("tiny_flux", tmp_path / "a.safetensors"), change("tiny_flux", tmp_path / "b.safetensors")
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before) and set(before) == set(after)


def test_equal_scales_stay_and_alpha_grows_with_the_rank(tmp_path):
    stems = {f"transformer.transformer_blocks.0.attn.to_{x}": (32, 32) for x in "qkv"}
    save_file(pairs(stems, 4, 0, 2.0), tmp_path / "a.safetensors")
    run_tool(
        {
            "tool": "convert",
            "path": str(tmp_path / "a.safetensors"),
            "out": str(tmp_path / "b.safetensors"),
            "layout": "comfyui",
            "family": "flux",
        }
    )
    written = load_file(tmp_path / "b.safetensors")
    assert float(written["diffusion_model.double_blocks.0.img_attn.qkv.alpha"]) == 6.0
    assert written["diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight"].shape == (12, 32)


STEMS = {"transformer_blocks.0.attn.to_q": (48, 48), "transformer_blocks.1.img_mlp.net.2": (48, 192)}


@pytest.fixture
def two(tmp_path):
    save_file(pairs(STEMS, 4, 1, 2.0), tmp_path / "one.safetensors")
    save_file(pairs({**STEMS, "transformer_blocks.1.attn.to_v": (48, 48)}, 3, 2), tmp_path / "two.safetensors")
    return tmp_path / "one.safetensors", tmp_path / "two.safetensors"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_merged_exactly(two, tmp_path, layout):
    out = tmp_path / "m.safetensors"
    run_tool(
        {"tool": "merge", "paths": [str(p) for p in two], "strengths": [0.7, -0.3], "out": str(out), "layout": layout}
    )
    one, other, got = (change("tiny_qwen_image", path) for path in (*two, out))
    for name, tensor in got.items():
        wanted = 0.7 * one.get(name, torch.zeros_like(tensor)) - 0.3 * other[name]
        assert torch.allclose(tensor, wanted, atol=1e-6), name
    assert "one.safetensors x 0.7" in metadata(out)["modelspec.merged_from"]


def test_merged_at_a_rank_states_its_error(two, tmp_path):
    out = tmp_path / "m.safetensors"
    answer = run_tool(
        {"tool": "merge", "paths": [str(p) for p in two], "strengths": [1, 1], "out": str(out), "rank": 5}
    )
    one, other, got = (change("tiny_qwen_image", path) for path in (*two, out))
    lost = whole = 0.0
    for name, tensor in got.items():
        exact = one.get(name, torch.zeros_like(tensor)) + other[name]
        values = torch.linalg.svdvals(exact)
        assert float(torch.linalg.matrix_norm(tensor - exact)) == pytest.approx(
            float(values[5:].square().sum().sqrt()), rel=1e-3, abs=1e-5
        )
        lost, whole = lost + float(values[5:].square().sum()), whole + float(values.square().sum())
    assert answer["error"] == pytest.approx((lost / whole) ** 0.5, rel=1e-3) and 0 < answer["error"] < 1


def test_resized(two, tmp_path):
    out = tmp_path / "r.safetensors"
    answer = run_tool({"tool": "resize", "path": str(two[0]), "out": str(out), "rank": 2})
    exact, got = change("tiny_qwen_image", two[0]), change("tiny_qwen_image", out)
    for name, tensor in got.items():
        u, s, v = torch.linalg.svd(exact[name], full_matrices=False)
        assert torch.allclose(tensor, u[:, :2] * s[:2] @ v[:2], atol=1e-5)
    assert set(answer["ranks"].values()) == {2}
    answer = run_tool({"tool": "resize", "path": str(two[0]), "out": str(out), "energy": 0.9, "overwrite": True})
    got = change("tiny_qwen_image", out)
    for name, tensor in got.items():
        kept = float(tensor.square().sum() / exact[name].square().sum())
        rank = answer["ranks"][name.removesuffix(".weight")]
        squares = torch.linalg.svdvals(exact[name]).square()
        assert kept >= 0.8999 and float(squares[: rank - 1].sum() / squares.sum()) < 0.9
    answer = run_tool({"tool": "resize", "path": str(two[0]), "out": str(out), "energy": 1.0, "overwrite": True})
    assert answer["error"] < 1e-6 and set(answer["ranks"].values()) == {4}
    for wrong in ({}, {"rank": 1, "energy": 0.5}, {"rank": 0}, {"energy": 1.5}):
        with pytest.raises(Trouble):
            run_tool({"tool": "resize", "path": str(two[0]), "out": str(out), "overwrite": True, **wrong})


def tuned_model(tmp_path, tensors: dict[str, torch.Tensor]):
    """The tiny model with LoRA `tensors` in its weights, as a folder of its own."""
    module = build("tiny_qwen_image")
    adapters.load(module, tensors, hot=False)
    folder = tmp_path / "tuned"
    folder.mkdir()
    save_file(module.state_dict(), folder / "diffusion_pytorch_model.safetensors")
    (folder / "config.json").write_text((QWEN / "config.json").read_text())
    return folder


def test_extracted(tmp_path):
    bias = {
        "transformer_blocks.0.attn.to_q.diff_b": torch.linspace(-1, 1, 48),
        "txt_norm.diff": torch.linspace(0, 1, 24),
    }
    tuned = tuned_model(tmp_path, {**pairs(STEMS, 3, 1), **bias})
    out = tmp_path / "x.safetensors"
    answer = run_tool({"tool": "extract", "tuned": str(tuned), "base": str(QWEN), "out": str(out), "rank": 4})
    assert answer["error"] < 1e-5 and metadata(out)["loft.family"] == "qwen_image"
    wanted, got = change("tiny_qwen_image", {**pairs(STEMS, 3, 1), **bias}), change("tiny_qwen_image", out)
    assert set(wanted) == set(got)
    for name, tensor in wanted.items():
        assert torch.allclose(got[name], tensor, atol=1e-5), name
    out.unlink()
    assert (
        run_tool({"tool": "extract", "tuned": str(tuned), "base": str(QWEN), "out": str(out), "rank": 1})["error"] > 0.1
    )
    with pytest.raises(Trouble, match="the same"):
        run_tool({"tool": "extract", "tuned": str(QWEN), "base": str(QWEN), "out": str(tmp_path / "y.safetensors")})
    with pytest.raises(Trouble):
        run_tool({"tool": "extract", "tuned": str(FLUX), "base": str(QWEN), "out": str(tmp_path / "y.safetensors")})


def test_baked(two, tmp_path):
    out = tmp_path / "baked" / "diffusion_pytorch_model.safetensors"
    answer = run_tool(
        {"tool": "bake", "base": str(QWEN), "paths": [str(p) for p in two], "strengths": [0.5, 1.0], "out": str(out)}
    )
    module, weights = build("tiny_qwen_image"), load_file(out)
    adapters.load(module, two[0], strength=0.5, hot=False)
    adapters.load(module, two[1], strength=1.0, hot=False)
    for name, tensor in module.state_dict().items():
        assert torch.allclose(weights[name], tensor, atol=1e-6), name
    assert "2 modules" in answer["said"] and "3 modules" in answer["said"]
    half = tmp_path / "half.safetensors"
    run_tool(
        {
            "tool": "bake",
            "base": str(CASES / "ckpt_scaled_fp8.safetensors"),
            "paths": [str(two[0])],
            "strengths": [1.0],
            "out": str(half),
        }
    )
    assert {tensor.dtype for tensor in load_file(half).values()} == {torch.bfloat16}


def test_metadata_read_edited_and_stripped(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file(pairs(STEMS, 2, 0), path, metadata={"format": "pt", "ss_tag_frequency": "{}", "note": "mine"})
    tensors = load_file(path)
    assert run_tool({"tool": "metadata", "path": str(path)})["metadata"]["note"] == "mine"
    with pytest.raises(Trouble, match="in place"):
        run_tool({"tool": "metadata", "path": str(path), "strip": True})
    out = tmp_path / "b.safetensors"
    run_tool(
        {
            "tool": "metadata",
            "path": str(path),
            "out": str(out),
            "set": {"modelspec.title": "Zürich ✓"},
            "remove": ["note"],
        }
    )
    assert metadata(out) == {"format": "pt", "ss_tag_frequency": "{}", "modelspec.title": "Zürich ✓"}
    run_tool({"tool": "metadata", "path": str(path), "strip": True, "overwrite": True})
    assert metadata(path) == {"format": "pt"}
    for written in (path, out):
        again = load_file(written)
        assert set(again) == set(tensors) and all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_pickles_become_safetensors(tmp_path):
    shared_tensor = torch.randn(4, 4)
    torch.save(
        {"state_dict": {"a": shared_tensor, "b": shared_tensor.t(), "c": torch.tensor(3), "epoch": 5}},
        tmp_path / "m.ckpt",
    )
    answer = run_tool({"tool": "to_safetensors", "path": str(tmp_path / "m.ckpt")})
    written = load_file(answer["path"])
    assert (
        torch.equal(written["a"], shared_tensor)
        and torch.equal(written["b"], shared_tensor.t())
        and int(written["c"]) == 3
    )
    with pytest.raises(Trouble, match="is there already"):
        run_tool({"tool": "to_safetensors", "path": str(tmp_path / "m.ckpt")})


def test_a_folder_that_is_a_file_is_said(two, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(Trouble, match="cannot be written"):
        run_tool(
            {"tool": "convert", "path": str(two[0]), "out": str(tmp_path / "file" / "a.safetensors"), "layout": "kohya"}
        )


def test_strengths_block_by_block(two):
    answer = run_tool({"tool": "strengths", "path": str(two[0])})
    exact = change("tiny_qwen_image", two[0])
    names = {
        "transformer_blocks.0": "transformer_blocks.0.attn.to_q.weight",
        "transformer_blocks.1": "transformer_blocks.1.img_mlp.net.2.weight",
    }
    assert [block["name"] for block in answer["blocks"]] == list(names)
    for block in answer["blocks"]:
        assert block["norm"] == pytest.approx(float(torch.linalg.matrix_norm(exact[names[block["name"]]])), rel=1e-4)
    shown = block_norms.block_strengths(two[0])  # as the page shows them, without torch
    assert [(block["name"], pytest.approx(block["norm"], rel=1e-5)) for block in answer["blocks"]] == shown
    fused = run_tool({"tool": "strengths", "path": str(CASES / "flux_kohya_fused.safetensors")})["blocks"]
    assert {block["name"] for block in fused} == {"transformer_blocks.0", "single_transformer_blocks.1"}
    assert json.loads(json.dumps(answer)) == answer


def test_nothing_is_left_behind_by_what_is_stopped_or_refused(two, tmp_path):
    before = sorted(tmp_path.iterdir())
    settings = {"tool": "convert", "path": str(two[0]), "out": str(tmp_path / "c.safetensors"), "layout": "kohya"}
    with pytest.raises(Cancelled):
        run_tool(settings, should_stop=lambda: True)
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(Trouble, match="is there already"):
        run_tool({**settings, "out": str(two[1])})
    assert sorted(tmp_path.iterdir()) == before
    seen = []
    run_tool(settings, on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    for wrong in (
        {"tool": "nothing"},
        {"tool": "convert"},
        {**settings, "strange": 1},
        {**settings, "layout": "x"},
        {**settings, "family": "x"},
    ):
        with pytest.raises(Trouble):
            run_tool({**wrong, "out": str(tmp_path / "d.safetensors")} if "path" in wrong else wrong)


def test_the_proof_finds_a_wrong_file(two, tmp_path, monkeypatch):
    import backend.engine.lora.tools.convert as module

    original = module.write_layout

    def wrong(*arguments):
        tensors = original(*arguments)
        name = next(key for key in tensors if "lora_up" in key)
        tensors[name] = tensors[name] * 1.01
        return tensors

    monkeypatch.setattr(module, "write_layout", wrong)
    with pytest.raises(Trouble, match="came out"):
        run_tool({"tool": "convert", "path": str(two[0]), "out": str(tmp_path / "c.safetensors"), "layout": "kohya"})
    assert not (tmp_path / "c.safetensors").exists()


def test_the_command_line(two, tmp_path, capsys):
    out = tmp_path / "cli.safetensors"
    assert command_line.main(["convert", str(two[0]), str(out), "--layout", "diffusers"]) == 0
    assert "read back" in capsys.readouterr().out
    assert command_line.main(["convert", str(two[0]), str(out), "--layout", "diffusers"]) == 1
    assert "is there already" in capsys.readouterr().err
    assert command_line.main(["merge", f"{two[0]}:0.5", str(two[1]), "--out", str(out), "--overwrite"]) == 0
    assert command_line.main(["metadata", str(out), "--set", "note=a=b", "--overwrite"]) == 0
    assert metadata(out)["note"] == "a=b"
    assert command_line.main(["strengths", str(out)]) == 0
    assert "transformer_blocks.0" in capsys.readouterr().out
    assert set(TOOLS) == {"convert", "merge", "resize", "extract", "bake", "metadata", "to_safetensors", "strengths"}


@pytest.mark.parametrize(
    "typed, said",
    [
        ("merge A:0 B:0 --out OUT", "All strengths are 0"),
        ("merge A:1 A:-1 --out OUT", "cancel each other"),
        ("merge A:abc --out OUT", "'abc' in A:abc is no strength. Write one.safetensors:0.8"),
        ("merge A:nan --out OUT", "strength of one.safetensors is nan"),
        ("merge A --out OUT --rank 0", "The rank is 0"),
        ("merge A --out FOLDER", "is no name for a file"),
        (
            "merge A --out OUT.txt",
            "does not end in .safetensors, so no program would find it. Call it out.safetensors.safetensors.",
        ),
        ("resize A OUT --rank 0", "The rank is 0"),
        ("resize A OUT --energy 1.5", "The energy is 1.5"),
        ("resize A OUT", "Give either a rank or a share"),
        ("extract A B OUT --rank -5", "The rank is -5"),
        ("bake MODEL A:0 --out OUT", "All strengths are 0"),
        ("metadata A --set note --out OUT", "--set note names no value"),
        ("metadata A --set =x --out OUT", "A metadata key has no name"),
        ("metadata A --remove note --out OUT", "There is no metadata 'note' to remove"),
        ("metadata A --out OUT", "Nothing is to be changed"),
    ],
)
def test_what_makes_no_sense_is_said_and_nothing_is_written(two, tmp_path, capsys, typed, said):
    before, out = sorted(tmp_path.iterdir()), tmp_path / "out.safetensors"
    names = {"A": two[0], "B": two[1], "OUT": out, "FOLDER": tmp_path, "MODEL": tmp_path}
    words = re.sub(r"\b(A|B|OUT|FOLDER|MODEL)\b", lambda found: str(names[found[0]]), typed).split()
    assert command_line.main(words) == 1
    assert said in capsys.readouterr().err.replace(str(two[0]), "A") and sorted(tmp_path.iterdir()) == before


def test_a_file_at_strength_zero_is_left_out_of_a_merge(two, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    assert command_line.main(["merge", f"{two[0]}:0", f"{two[1]}:1", "--out", str(out)]) == 0
    assert "1 file merged exactly; 1 at strength 0 left out." in capsys.readouterr().out
    assert load_file(out)["diffusion_model.transformer_blocks.1.attn.to_v.lora_A.weight"].shape[0] == 3
