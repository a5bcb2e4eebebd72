"""What LoRA files mean where readers disagree: handed files with exactly known answers, and members of each kind computed here in float64."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file

from backend.engine.lora import adapters as lora
from backend.engine.lora.tools.commands import run_tool
from backend.schema.messages import Trouble
from tests.lora_models import CASES, assert_acts_as, assert_changed_by, same, shared, snapshot

pytestmark = pytest.mark.torch
HANDED = Path(__file__).parents[2] / "cases" / "lora2"
QWEN, Q, K = "tiny_qwen_image", "transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_k"
BESIDE = {"peft_oft_exact": {"peft_type": "OFT", "use_cayley_neumann": False, "oft_block_size": 4, "r": 0}}
ANSWERS = {
    path.parent.name: json.loads(path.read_text())
    for path in sorted(HANDED.glob("*/answer.json"))
    if "outcome" in path.read_text()
}
generator = torch.Generator()


@pytest.fixture(autouse=True)
def _seed():
    generator.manual_seed(11)


def draw(*shape: int, size: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=generator) * size


def pair(stem: str, rank: int = 4, *, names=("lora_A.weight", "lora_B.weight"), width: int = 48) -> dict:
    return {f"{stem}.{names[0]}": draw(rank, width, size=0.3), f"{stem}.{names[1]}": draw(width, rank, size=0.3)}


def product(file: dict) -> torch.Tensor:
    down, up = file.values()
    return up.double() @ down.double()


def check(file, expected: dict, *, tolerance: float = 2e-5, strength: float = 1.0):
    """Added into the weights and beside them, `file` changes exactly `expected` (parameter -> float64), and taking it off restores every bit."""
    model = shared(QWEN)
    before = snapshot(model)
    for hot in (False, True):
        receipt = lora.load(model, file, strength=strength, hot=hot)
        try:
            if hot:
                assert_acts_as(model, expected, max(tolerance, 2e-5), strength)
            else:
                assert_changed_by(
                    model, before, {name: strength * change for name, change in expected.items()}, tolerance
                )
        finally:
            lora.clear(model)
        assert same(model, before)
    return receipt


def refused(file, words: str, kind: str = "") -> Trouble:
    model = shared(QWEN)
    before = snapshot(model)
    for hot in (False, True):
        try:
            with pytest.raises(Trouble, match=words) as caught:
                lora.load(model, file, hot=hot)
            assert same(model, before) and not lora.of(model).loaded and kind in ("", caught.value.kind)
        finally:
            lora.clear(model)
    return caught.value


def placed(name: str, folder: Path) -> Path:
    """A handed file where it can be read; beside it what its title says was beside it."""
    path = folder / "adapter_model.safetensors"
    path.write_bytes((HANDED / name / "input.safetensors").read_bytes())
    if name in BESIDE:
        (folder / "adapter_config.json").write_text(json.dumps(BESIDE[name]))
    return path


@pytest.mark.parametrize("name", [name for name, answer in ANSWERS.items() if answer["outcome"] == "delta"])
def test_handed_files(name: str, tmp_path: Path):
    answer = ANSWERS[name]
    expected = load_file(HANDED / name / answer["expected_file"])
    expected = {key: change for key, change in expected.items() if bool(change.any())}
    check(placed(name, tmp_path), expected, tolerance=answer["tolerance"]["relative_to_max_abs_expected"])


def test_handed_files_that_are_refused():
    for name in ("dup_different_values",):
        trouble = refused(HANDED / name / "input.safetensors", "twice and differently", "repeated")
        assert f"transformer.{Q}.lora_A.weight" in trouble.message and f"and {Q}.lora_A.weight" in trouble.message


def test_the_handed_8_bit_file_is_multiplied_by_its_scales():
    path, stem = HANDED / "fp8_scaled_downup" / "input.safetensors", "lora_unet_transformer_blocks_0_attn_to_q"
    file = load_file(path)
    down, up = (
        file[f"{stem}.lora_{side}.weight"].double() * file[f"{stem}.lora_{side}.scale_weight"].double()
        for side in ("down", "up")
    )
    check(path, {f"{Q}.weight": up @ down})


# Orthogonal finetuning


def rotation(numbers: torch.Tensor, size: int, *, exact: bool = False, terms: int = 5) -> torch.Tensor:
    """The blocks of R along one diagonal, by the definitions, in float64."""
    blocks = []
    for row in numbers.double():
        skew = torch.zeros(size, size, dtype=torch.float64)
        for value, (i, j) in zip(row, itertools.combinations(range(size), 2), strict=True):
            skew[i, j], skew[j, i] = value, -value
        one = torch.eye(size, dtype=torch.float64)
        if exact:
            blocks.append((one - skew) @ torch.linalg.inv(one + skew))
            continue
        powers = [torch.linalg.matrix_power(skew, order) for order in range(max(terms, 4))]
        if terms == 1:
            blocks.append(one)
        elif terms == 2:
            blocks.append(one + 2 * skew)
        else:
            last = max(terms - 1, 3)
            blocks.append(one + 2 * sum(powers[1:last]) + powers[last])
    return torch.block_diag(*blocks)


def turned(numbers: torch.Tensor, size: int, name: str = Q, **how) -> torch.Tensor:
    weight = shared(QWEN).get_parameter(f"{name}.weight").double()
    return weight @ rotation(numbers, size, **how).t() - weight


CONFIGS = {
    "series": ({"use_cayley_neumann": True, "peft_version": "0.21.2"}, {}),
    "series of 3": ({"use_cayley_neumann": True, "num_cayley_neumann_terms": 3}, {"terms": 3}),
    "series of 4": ({"use_cayley_neumann": True, "num_cayley_neumann_terms": 4}, {"terms": 4}),
    "series of 9": ({"use_cayley_neumann": "true", "num_cayley_neumann_terms": 9}, {"terms": 9}),
    "series of 2": ({"use_cayley_neumann": True, "num_cayley_neumann_terms": 2}, {"terms": 2}),
    "Cayley's map": ({"use_cayley_neumann": False}, {"exact": True}),
    "nothing said": ({}, {}),
}


@pytest.mark.parametrize("where", ["config", "metadata", "plain metadata"])
@pytest.mark.parametrize("name", CONFIGS)
def test_oft_by_what_the_file_or_its_configuration_says(name: str, where: str, tmp_path: Path):
    said, how = CONFIGS[name]
    numbers, path = draw(6, 28, size=0.08), tmp_path / "adapter_model.safetensors"
    fields = {"peft_type": "OFT", **said}
    metadata = {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in fields.items()})}
    if where == "plain metadata":
        metadata = {key: str(value) for key, value in fields.items()}
    save_file({f"base_model.model.{Q}.oft_R.weight": numbers}, path, None if where == "config" else metadata)
    if where == "config":
        (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    check(path, {f"{Q}.weight": turned(numbers, 8, **how)}, strength=0.7)


def test_oft_of_one_block_for_all_and_of_a_scaled_file():
    shared_block = draw(1, 6, size=0.1)
    check({f"{Q}.oft_R.weight": shared_block}, {f"{Q}.weight": turned(shared_block.expand(12, 6), 4)})
    numbers = draw(12, 6, size=0.3)
    file = {f"lora_transformer_{Q.replace('.', '_')}.oft_R.weight": numbers}
    marked = {**file, f"lora_transformer_{Q.replace('.', '_')}.oft_R.scaled_oft": torch.tensor(1)}
    receipt = check(marked, {f"{Q}.weight": turned(numbers / 6**0.5, 4)})
    assert any("does not say how its rotations" in note for note in receipt.notes)


def test_oft_that_is_projected(tmp_path: Path):
    numbers, eps = draw(12, 6, size=0.2), 0.05
    numbers[0] = 1e-4
    lengths = (2 * numbers.double().square().sum(1)).sqrt()[:, None]
    bound = eps / 12**0.5
    projected = torch.where(lengths <= bound, numbers.double(), numbers.double() * bound / lengths)
    path = tmp_path / "any name.safetensors"
    save_file({f"base_model.model.{Q}.oft_R.weight": numbers}, path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "OFT", "coft": True, "eps": eps}))
    check(path, {f"{Q}.weight": turned(projected, 4)})


@pytest.mark.parametrize("rescaled", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 50.0])
def test_diag_oft_turns_outputs(rescaled: bool, alpha: float):
    blocks, rescale = draw(12, 4, 4, size=0.1), draw(48, 1).abs() + 0.5
    stem = "lycoris_" + Q.replace(".", "_")
    file = {f"{stem}.oft_blocks": blocks, f"{stem}.alpha": torch.tensor(alpha)}
    file |= {f"{stem}.rescale": rescale} if rescaled else {}
    weight = shared(QWEN).get_parameter(f"{Q}.weight").double()
    one, turned_rows = torch.eye(4, dtype=torch.float64), []
    for block, rows in zip(blocks.double(), weight.split(4), strict=True):
        skew = block - block.t()
        turned_rows.append(((one + skew) @ torch.linalg.inv(one - skew)).t() @ rows)
    new = torch.cat(turned_rows) * (rescale.double() if rescaled else 1.0)
    check(file, {f"{Q}.weight": new - weight}, strength=0.6)
    refused({**file, f"{stem}.alpha": torch.tensor(0.01)}, "OFT.*two ways", "unknown_algorithm")
    refused(
        {
            f"oft_unet_{Q.replace('.', '_')}.oft_blocks": blocks,
            f"oft_unet_{Q.replace('.', '_')}.alpha": torch.tensor(0.0),
        },
        "OFT",
    )
    refused({f"{stem}.oft_blocks": blocks}, "uses OFT", "unknown_algorithm")
    refused({**file, f"{stem}.oft_blocks": draw(10, 4, 4)}, "rotation", "shape_mismatch")


def test_oft_on_a_fused_projection_turns_what_all_its_rows_read():
    model, numbers = shared("tiny_flux"), draw(8, 6, size=0.1)
    before = snapshot(model)
    names = [f"transformer_blocks.0.attn.to_{letter}.weight" for letter in "qkv"]
    turn = rotation(numbers, 4).t()
    expected = {name: before[name].double() @ turn - before[name].double() for name in names}
    lora.load(model, {"double_blocks.0.img_attn.qkv.oft_R.weight": numbers}, hot=False)
    assert_changed_by(model, before, expected)
    lora.clear(model)
    assert same(model, before)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_cayley_neumann": "perhaps"}, "use_cayley_neumann.*'perhaps'"),
        ({"num_cayley_neumann_terms": 0}, "num_cayley_neumann_terms.*'0'"),
        ({"num_cayley_neumann_terms": 10**9}, "num_cayley_neumann_terms"),
        ({"coft": True, "eps": -1}, "eps.*-1"),
    ],
)
def test_oft_settings_without_a_meaning_are_refused(fields: dict, words: str, tmp_path: Path):
    path = tmp_path / "adapter_model.safetensors"
    save_file({f"{Q}.oft_R.weight": draw(12, 6)}, path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "OFT", **fields}))
    refused(path, words, "bad_value")


@pytest.mark.parametrize("name", ["oft_embedding_R.weight", "oft_r.default", "initial_norm"])
def test_relatives_of_oft_are_refused_by_name(name: str):
    refused({f"{Q}.{name}": torch.ones(12, 4, 4), f"{Q}.oft_R.weight": draw(12, 6)}, "OFT", "unknown_algorithm")


@pytest.mark.parametrize("exact", [False, True])
def test_peft_reads_and_writes_oft_as_it_is_read_here(exact: bool, tmp_path: Path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(24, 10), torch.nn.Tanh(), torch.nn.Linear(10, 4))
    bare = torch.nn.Sequential(torch.nn.Linear(24, 10), torch.nn.Tanh(), torch.nn.Linear(10, 4))
    bare.load_state_dict(net.state_dict())
    config = peft.OFTConfig(r=0, oft_block_size=6, target_modules=["0"], use_cayley_neumann=not exact)
    model = peft.get_peft_model(net, config)
    model.base_model.model[0].oft_R["default"].weight.data = draw(4, 15, size=0.1)
    model.save_pretrained(tmp_path)
    x, plain = draw(5, 24), bare(draw(5, 24))
    for hot in (True, False):
        lora.load(bare, tmp_path, hot=hot)
        torch.testing.assert_close(bare(x), model(x), rtol=1e-5, atol=1e-6)
        lora.clear(bare)
    assert plain.shape == (5, 4)


# One module described twice

SPELLINGS = [
    (f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"),
    (f"transformer.{Q}.lora_A.weight", f"transformer.{Q}.lora_B.weight"),
    (f"base_model.model.{Q}.lora_A.default.weight", f"base_model.model.{Q}.lora_B.default.weight"),
    (f"diffusion_model.{Q}.lora_down.weight", f"diffusion_model.{Q}.lora_up.weight"),
    (f"{Q}.lora_down.weight", f"{Q}.lora_up.weight"),
    (f"lora_unet_{Q.replace('.', '_')}.lora_down.weight", f"lora_unet_{Q.replace('.', '_')}.lora_up.weight"),
    (f"{Q}.lora_A.style.weight", f"{Q}.lora_B.style.weight"),
    (
        f"lora_transformer_{Q.replace('.', '_')}.lora.down.weight",
        f"lora_transformer_{Q.replace('.', '_')}.lora.up.weight",
    ),
]


@pytest.mark.parametrize(("one", "two"), list(itertools.combinations(range(len(SPELLINGS)), 2)))
def test_one_module_under_two_spellings(one: int, two: int):
    down, up = draw(4, 48, size=0.3), draw(48, 4, size=0.3)
    keys = [*SPELLINGS[one], *SPELLINGS[two]]
    model = shared(QWEN)
    before = snapshot(model)
    receipt = lora.load(model, dict(zip(keys, (down, up, down, up), strict=True)), hot=False)
    assert_changed_by(model, before, {f"{Q}.weight": up.double() @ down.double()})
    assert receipt.layers_applied == receipt.layers_found == 1
    assert any("twice with equal values" in note for note in receipt.notes)
    lora.clear(model)
    with pytest.raises(Trouble, match="twice and differently") as caught:
        lora.load(model, dict(zip(keys, (down, up, down, up * 1.01), strict=True)))
    assert caught.value.kind == "repeated" and same(model, before)
    assert all(any(key in caught.value.message for key in spelt) for spelt in (SPELLINGS[one], SPELLINGS[two]))


def test_equal_changes_in_other_forms_are_one():
    """Kohya's copy has an alpha, the other has it in its factors; four dimensions for a linear layer; float16 beside float32."""
    down, up = draw(4, 48).half().float(), draw(48, 4).half().float()
    stem = f"lora_unet_{Q.replace('.', '_')}"
    kohya = {f"{stem}.lora_down.weight": down[..., None, None], f"{stem}.lora_up.weight": up[..., None, None]}
    kohya[f"{stem}.alpha"] = torch.tensor(8.0)
    check(
        {**kohya, f"{Q}.lora_A.weight": down.half(), f"{Q}.lora_B.weight": 2 * up},
        {f"{Q}.weight": 2 * up.double() @ down.double()},
    )
    refused({**kohya, f"{Q}.lora_A.weight": down, f"{Q}.lora_B.weight": up}, "twice and differently")


def test_other_kinds_twice():
    diff, numbers, magnitude = draw(48, 48), draw(12, 6, size=0.1), draw(48).abs() + 0.5
    check({f"{Q}.diff": diff, f"diffusion_model.{Q}.diff": diff}, {f"{Q}.weight": diff.double()})
    refused({f"{Q}.diff": diff, f"diffusion_model.{Q}.diff": diff + 1}, f"{Q}.diff and diffusion_model")
    refused({f"{Q}.diff_b": diff[0], f"diffusion_model.{Q}.diff_b": diff[1]}, "twice and differently")
    check({f"{Q}.oft_R.weight": numbers, f"transformer.{Q}.oft_R.weight": numbers}, {f"{Q}.weight": turned(numbers, 4)})
    refused({f"{Q}.oft_R.weight": numbers, f"transformer.{Q}.oft_R.weight": -numbers}, "twice and differently")
    factors = pair(Q)
    one = {**factors, f"{Q}.dora_scale": magnitude[:, None]}
    two = {f"transformer.{key}": tensor for key, tensor in one.items()}
    model = shared(QWEN)
    assert lora.load(model, {**one, **two}).layers_applied == 1
    lora.clear(model)
    refused({**one, **two, f"transformer.{Q}.dora_scale": magnitude[:, None] * 2}, "twice and differently")


def test_one_alpha_and_one_set_of_magnitudes_for_a_module():
    factors, magnitude = pair(Q), draw(48).abs() + 0.5
    refused(
        {**factors, f"{Q}.alpha": torch.tensor(4.0), f"transformer.{Q}.alpha": torch.tensor(2.0)}, "alpha.*differently"
    )
    check(
        {**factors, f"{Q}.alpha": torch.tensor(2.0), f"transformer.{Q}.alpha": torch.tensor([2.0])},
        {f"{Q}.weight": 0.5 * product(factors)},
    )
    dora = {**factors, f"{Q}.dora_scale": magnitude[:, None], f"{Q}.lora_magnitude_vector": magnitude}
    lora.load(shared(QWEN), dora)
    lora.clear(shared(QWEN))
    refused({**dora, f"{Q}.lora_magnitude_vector": magnitude + 1}, "magnitudes.*differently", "repeated")


def test_a_fused_module_beside_its_parts():
    model = shared("tiny_flux")
    before = snapshot(model)
    down, up = draw(4, 32, size=0.3), draw(96, 4, size=0.3)
    names = [f"transformer_blocks.0.attn.to_{letter}" for letter in "qkv"]
    fused = {"double_blocks.0.img_attn.qkv.lora_A.weight": down, "double_blocks.0.img_attn.qkv.lora_B.weight": up}
    parts = {}
    for name, rows in zip(names, up.chunk(3), strict=True):
        parts |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": rows}
    lora.load(model, {**fused, **parts}, hot=False)
    whole = up.double() @ down.double()
    assert_changed_by(model, before, dict(zip([f"{name}.weight" for name in names], whole.chunk(3), strict=True)))
    lora.clear(model)
    with pytest.raises(Trouble, match="twice and differently"):
        lora.load(model, {**fused, **parts, f"{names[1]}.lora_B.weight": up[:32]})
    assert same(model, before)


def test_an_alpha_under_another_spelling_belongs_to_its_module():
    factors = pair(Q)
    check({**factors, f"transformer.{Q}.alpha": torch.tensor(1.0)}, {f"{Q}.weight": 0.25 * product(factors)})


def test_tools_count_a_module_once(tmp_path: Path):
    down, up = draw(4, 48, size=0.3), draw(48, 4, size=0.3)
    keys = [*SPELLINGS[1], *SPELLINGS[5]]
    twice, wrong = tmp_path / "twice.safetensors", tmp_path / "wrong.safetensors"
    save_file(dict(zip(keys, (down, up, down.clone(), up.clone()), strict=True)), twice)
    save_file(dict(zip(keys, (down, up, down.clone(), up * 2), strict=True)), wrong)
    out, base = tmp_path / "out.safetensors", CASES / "models" / QWEN / "diffusion_pytorch_model.safetensors"
    jobs = {
        "convert": {"path": "{}", "layout": "kohya"},
        "merge": {"paths": ["{}"], "strengths": [1.0]},
        "resize": {"path": "{}", "rank": 4},
        "bake": {"base": str(base), "paths": ["{}"], "strengths": [1.0]},
    }
    expected = up.double() @ down.double()
    for tool, settings in jobs.items():
        family = {} if tool == "bake" else {"family": "qwen_image"}

        def filled(path: Path, settings=settings):
            return {
                key: [str(path)] if value == ["{}"] else str(path) if value == "{}" else value
                for key, value in settings.items()
            }

        run_tool({"tool": tool, **filled(twice), **family, "out": str(out), "overwrite": True})
        if tool == "bake":
            change = load_file(out)[f"{Q}.weight"].double() - load_file(base)[f"{Q}.weight"].double()
            assert float((change - expected).abs().max()) < 1e-5
        else:
            check(out, {f"{Q}.weight": expected})
        with pytest.raises(Trouble, match="twice and differently"):
            run_tool({"tool": tool, **filled(wrong), **family, "out": str(tmp_path / "none.safetensors")})
        assert not (tmp_path / "none.safetensors").exists()
    one = run_tool({"tool": "strengths", "path": str(twice), "family": "qwen_image"})["blocks"]
    assert one[0]["norm"] == pytest.approx(float(expected.norm()), rel=1e-5)
    with pytest.raises(Trouble, match="twice and differently"):
        run_tool({"tool": "strengths", "path": str(wrong), "family": "qwen_image"})


# Patterns for alpha

PATTERNS = [
    (r"transformer_blocks\.(?:0|7)\.attn\.to_q", {Q}),
    (r"transformer_blocks\.(?!1)\d+\.attn\.to_q", {Q}),
    (r"transformer_blocks\.\d{1}\.attn\.to_(?:q|k)", {Q, K}),
    (r"(?:transformer_blocks\.)?0\.attn\.to_q", {Q}),
    (r"^transformer_blocks\.0\.attn\.to_k", {K}),
    (r"attn\.to_[^k]", {Q}),
    (r"(?<=attn\.)to_q", {Q}),
    (r"(?<!attn\.)to_q", set()),
    (r"(?i:ATTN)\.to_q", {Q}),
    (r"to", set()),
    (r"(?:blocks_\d+\.|0\.|attn\.)+to_q", {Q}),
    (r".*", {Q, K}),
    (r"attn.to_q$", {Q}),
]


@pytest.mark.parametrize(("pattern", "meant"), PATTERNS)
def test_patterns_are_pefts(pattern: str, meant: set[str], tmp_path: Path):
    from peft.utils.other import get_pattern_key

    assert {name for name in (Q, K) if get_pattern_key([pattern], name) == pattern} == meant or pattern in (Q, K)
    one, two = pair(Q), pair(K)
    said = {"transformer.r": 4, "transformer.lora_alpha": 8, "transformer.alpha_pattern": {pattern: 100}}
    path = tmp_path / "a.safetensors"
    save_file(
        {f"transformer.{key}": tensor for key, tensor in {**one, **two}.items()},
        path,
        {"lora_adapter_metadata": json.dumps(said)},
    )
    check(
        path,
        {f"{name}.weight": (25.0 if name in meant else 2.0) * product(file) for name, file in ((Q, one), (K, two))},
    )


def test_the_first_pattern_that_matches_rules(tmp_path: Path):
    factors = pair(Q)
    path = tmp_path / "adapter_model.safetensors"
    save_file({f"base_model.model.{key}": tensor for key, tensor in factors.items()}, path)
    said = {
        "peft_type": "LORA",
        "lora_alpha": 4,
        "alpha_pattern": {"no_such": 1, r"attn\..*": 12, "to_q": 40},
        "use_rslora": True,
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(said))
    check(path, {f"{Q}.weight": 6.0 * product(factors)})


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"(\w+\.?)+!", "does not come to an end"),
        (r"(?:(?:\w|\.)+)+#", "does not come to an end"),
        ("to_(q", "no regular expression"),
        ("[", "no regular expression"),
        ("x" * 3000, "longer than"),
    ],
)
def test_patterns_that_cannot_be_used_are_refused_by_name(pattern: str, words: str, tmp_path: Path, monkeypatch):
    from backend.catalog.lora import peft_patterns

    monkeypatch.setattr(peft_patterns, "SECONDS", 0.5)
    path = tmp_path / "a.safetensors"
    said = {"transformer.lora_alpha": 8, "transformer.alpha_pattern": {pattern: 100}}
    save_file(
        {f"transformer.{key}": tensor for key, tensor in pair(Q).items()},
        path,
        {"lora_adapter_metadata": json.dumps(said)},
    )
    trouble = refused(path, words, "bad_value")
    assert len(pattern) > 100 or pattern in trouble.message.replace("\\\\", "\\")


# Some into the weights, some beside them

MIXED = {
    name: HANDED / "mixed_hot_cold" / f"{name}.safetensors"
    for name in ("lora", "dora_rows", "dora_cols", "oft", "lokr")
}


def alone(name: str, base: torch.Tensor) -> torch.Tensor:
    """What one of the handed files does to a weight by itself, float64."""
    file = {key.removeprefix(f"{Q}."): tensor.double() for key, tensor in load_file(MIXED[name]).items()}
    if name == "oft":
        return base @ rotation(file["oft_R.weight"], 4).t() - base
    if name == "lokr":
        return torch.kron(file["lokr_w1"], file["lokr_w2"])
    delta = file["lora_B.weight"] @ file["lora_A.weight"]
    if name == "lora":
        return delta
    whole = base + delta
    return file["dora_scale"] * whole / whole.norm(dim=1 if name == "dora_rows" else 0, keepdim=True) - base


@pytest.mark.parametrize("names", [(a, b) for a, b in itertools.permutations(MIXED, 2)])
def test_one_fused_and_one_beside_add_up(names: tuple[str, str]):
    model = shared(QWEN)
    before = snapshot(model)
    base = before[f"{Q}.weight"].double()
    layer = model.get_submodule(Q)
    x = draw(7, 48)
    plain = x.double() @ base.t() + before[f"{Q}.bias"].double()
    for modes in ((False, True), (True, False)):
        receipts = [
            lora.load(model, MIXED[name], hot=hot, strength=0.8) for name, hot in zip(names, modes, strict=True)
        ]
        wanted = [x.double() @ (0.8 * alone(name, base)).t() for name in names]
        effect = sum(wanted)
        assert float((layer(x).double() - plain - effect).abs().max()) < 2e-5 * float(effect.abs().max())
        receipts[0] = lora.of(model).set_strength(receipts[0], 0.4)
        effect = 0.5 * wanted[0] + wanted[1]
        assert float((layer(x).double() - plain - effect).abs().max()) < 2e-5 * float(effect.abs().max())
        lora.of(model).remove(receipts[0])
        assert float((layer(x).double() - plain - wanted[1]).abs().max()) < 2e-5 * float(wanted[1].abs().max())
        lora.clear(model)
        assert same(model, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_ones_on_a_pipeline_use_the_models_file(dtype: torch.dtype):
    """The file is the backup: nothing of the model is kept in memory for it, and taking all off restores every bit."""
    from backend.pipelines import ModelConfig, QwenImagePipeline

    base = CASES / "models" / QWEN / "diffusion_pytorch_model.safetensors"
    pipe = QwenImagePipeline.from_pretrained(
        torch_dtype=dtype, device="cpu", model_configs=[ModelConfig(path=str(base))], tokenizer_config=None
    )
    before = snapshot(pipe.dit)
    weight, x = before[f"{Q}.weight"].double(), draw(5, 48)
    plain = x.double() @ weight.t() + before[f"{Q}.bias"].double()
    receipts = [
        pipe.load_lora(pipe.dit, str(MIXED["dora_rows"]), hotload=True),
        pipe.load_lora(pipe.dit, str(MIXED["lora"]), hotload=False),
        pipe.load_lora(pipe.dit, str(MIXED["oft"]), hotload=True, alpha=0.5),
        pipe.load_lora(pipe.dit, str(MIXED["lokr"]), hotload=False),
        pipe.load_lora(pipe.dit, str(MIXED["dora_cols"]), hotload=False),
    ]
    assert not pipe.pipeline.adapters._kept
    effects = [x.double() @ alone(name, weight).t() for name in ("dora_rows", "lora", "oft", "lokr", "dora_cols")]
    effects[2] = effects[2] * 0.5
    layer, close = pipe.dit.get_submodule(Q), 2e-5 if dtype == torch.float32 else 2e-2
    for number in range(5):
        wanted = sum(effects)
        got = layer(x.to(dtype)).double() - plain
        assert float((got - wanted).abs().max()) < close * float(max(plain.abs().max(), wanted.abs().max())), number
        pipe.pipeline.remove_lora(receipts[number])
        effects[number] = torch.zeros_like(effects[number])
    assert same(pipe.dit, before)


# Rounding


def narrow(dtype: torch.dtype, size: int = 64) -> torch.nn.Module:
    torch.manual_seed(4)
    return torch.nn.Sequential(torch.nn.Linear(size, size, bias=False)).to(dtype).requires_grad_(False)


def test_several_fused_ones_are_rounded_once_in_any_order():
    files = [pair("0", 2, width=64) for _ in range(8)]
    files = [{key: tensor * 0.02 for key, tensor in file.items()} for file in files]
    model = narrow(torch.bfloat16)
    base = model[0].weight.clone()
    total = base.double() + sum(0.9 * product(file) for file in files)
    receipts = [lora.load(model, file, strength=0.9, hot=False) for file in files]
    assert torch.equal(model[0].weight, total.to(torch.bfloat16))
    again = narrow(torch.bfloat16)
    for file in reversed(files):
        lora.load(again, file, strength=0.9, hot=False)
    assert torch.equal(model[0].weight, again[0].weight)
    receipts[2] = lora.of(model).set_strength(receipts[2], -2.0)
    lora.of(model).remove(receipts[5])
    total = base.double() + sum((-2.0 if at == 2 else 0.9) * product(f) for at, f in enumerate(files) if at != 5)
    assert torch.equal(model[0].weight, total.to(torch.bfloat16))
    for at, receipt in enumerate(receipts):
        if at not in (5, 7):
            lora.of(model).remove(receipt)
    once = narrow(torch.bfloat16)
    lora.load(once, files[7], strength=0.9, hot=False)
    assert torch.equal(model[0].weight, once[0].weight)
    lora.clear(model)
    assert torch.equal(model[0].weight, base)


def test_files_asked_for_together_are_as_if_added_one_by_one(tmp_path: Path):
    from backend.schema.request import LoraUse

    paths = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for path in paths:
        save_file({key: tensor * 0.02 for key, tensor in pair("0", 2, width=64).items()}, path)
    one, two = narrow(torch.bfloat16), narrow(torch.bfloat16)
    base = one[0].weight.clone()
    for path in paths:
        lora.load(one, path, hot=False)
    adapters = lora.of(two)
    adapters.use([LoraUse(path=str(path), strength=1.0) for path in paths], hot=False)
    assert torch.equal(one[0].weight, two[0].weight) and not torch.equal(base, two[0].weight)
    assert all(loaded.changes is None for loaded in adapters.loaded)
    adapters.use([LoraUse(path=str(paths[1]), strength=1.0)], hot=False)
    lone = narrow(torch.bfloat16)
    lora.load(lone, paths[1], hot=False)
    assert torch.equal(two[0].weight, lone[0].weight)
    adapters.use([])
    assert torch.equal(two[0].weight, base)


def test_where_settling_fails_no_lora_is_said_to_act(tmp_path: Path, monkeypatch):
    from backend.engine.lora import fuse
    from backend.schema.request import LoraUse

    path = tmp_path / "a.safetensors"
    save_file(pair("0", 2, width=64), path)
    model = narrow(torch.bfloat16)
    base = model[0].weight.clone()

    def fails(*_):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(fuse, "fuse", fails)
        with pytest.raises(MemoryError):
            lora.of(model).use([LoraUse(path=str(path), strength=1.0)], hot=False)
    assert lora.of(model).receipts == () and torch.equal(model[0].weight, base)
    lora.load(model, path, hot=False)
    assert not torch.equal(model[0].weight, base)


@pytest.mark.parametrize("hot", [False, True])
def test_tensors_that_were_given_may_change_afterwards(hot: bool):
    model, file = narrow(torch.float32), pair("0", 2, width=64)
    other = pair("0", 2, width=64)
    base, x = model[0].weight.clone(), draw(3, 64)
    first = lora.load(model, file, hot=hot)
    lora.load(model, other, hot=hot)
    wanted = x.double() @ (base.double() + 0.5 * product(file) + product(other)).t()
    for tensor in (*file.values(), *other.values()):
        tensor.mul_(7.0)
    lora.of(model).set_strength(first, 0.5)
    assert torch.allclose(model(x).double(), wanted, atol=1e-4)


@pytest.mark.parametrize("size", [1e4, 1e-4, 6e7, 1e-7])
@pytest.mark.parametrize("kind", ["LoRA", "LoKr"])
def test_factors_far_apart_do_not_overflow_beside_float16(size: float, kind: str):
    model, x = narrow(torch.float16), draw(3, 64, size=30.0).half()
    if kind == "LoRA":
        file = {"0.lora_A.weight": draw(4, 64) * size, "0.lora_B.weight": draw(64, 4) * 0.01 / size}
        change = product(file)
    else:
        file = {"0.lokr_w1": draw(8, 8) * 0.01 / size, "0.lokr_w2": draw(8, 8) * size}
        change = torch.kron(file["0.lokr_w1"].double(), file["0.lokr_w2"].double())
    wanted = x.double() @ (model[0].weight.double() + change).t()
    lora.load(model, file, hot=True)
    got = model(x).double()
    assert bool(got.isfinite().all()) and float((got - wanted).abs().max()) < 4e-3 * float(wanted.abs().max())


# Tools


def test_tools_keep_an_alpha_that_lies_beside_or_in_the_metadata(tmp_path: Path):
    handed = HANDED / "tool_loses_alpha_beside"
    peft = load_file(handed / "adapter_model.safetensors")
    light = load_file(handed / "lightning.safetensors")
    jobs = [
        ({"tool": "to_safetensors", "path": "adapter_model.bin"}, peft),
        ({"tool": "metadata", "path": "adapter_model.safetensors", "set": {"note": "x"}}, peft),
        ({"tool": "metadata", "path": "adapter_model.safetensors", "strip": True}, peft),
        ({"tool": "metadata", "path": "lightning.safetensors", "set": {"note": "x"}}, light),
        ({"tool": "metadata", "path": "lightning.safetensors", "set": {"lora_alpha": "1"}}, light),
        ({"tool": "metadata", "path": "lightning.safetensors", "strip": True}, light),
        ({"tool": "metadata", "path": "lightning.safetensors", "remove": ["lora_alpha"]}, light),
        ({"tool": "convert", "path": "adapter_model.safetensors", "layout": "diffusers", "family": "qwen_image"}, peft),
        ({"tool": "resize", "path": "lightning.safetensors", "rank": 4, "family": "qwen_image"}, light),
        ({"tool": "merge", "paths": ["adapter_model.safetensors"], "strengths": [1.0], "family": "qwen_image"}, peft),
    ]
    for number, (job, factors) in enumerate(jobs):
        out = tmp_path / f"{number}" / "out.safetensors"
        paths = {key: [str(handed / one) for one in value] if key == "paths" else value for key, value in job.items()}
        paths |= {"path": str(handed / job["path"])} if "path" in job else {}
        run_tool({**paths, "out": str(out)})
        check(out, {f"{Q}.weight": 4.0 * product(factors)})
    own = tmp_path / "own.safetensors"
    own.write_bytes((handed / "lightning.safetensors").read_bytes())
    run_tool({"tool": "metadata", "path": str(own), "strip": True, "overwrite": True})
    check(own, {f"{Q}.weight": 4.0 * product(light)})
    unchanged = tmp_path / "unchanged.safetensors"
    run_tool(
        {"tool": "metadata", "path": str(handed / "lightning.safetensors"), "set": {"note": "x"}, "out": str(unchanged)}
    )
    assert not any(key.endswith(".alpha") for key in load_file(unchanged))  # its metadata still says it


def test_patterns_for_dotted_names_go_along_with_a_flattened_file(tmp_path: Path):
    q, k = pair(Q), pair(K)
    said = {"transformer.lora_alpha": 8, "transformer.alpha_pattern": {r"0\.attn\.to_q": 100}}
    path, out = tmp_path / "a.safetensors", tmp_path / "out" / "a.safetensors"
    file = {
        "lora_unet_" + key.split(".lora")[0].replace(".", "_") + ".lora" + key.split(".lora")[1]: tensor
        for key, tensor in {**q, **k}.items()
    }
    metadata = {"lora_adapter_metadata": json.dumps(said), "modelspec.architecture": "Qwen-Image/lora"}
    save_file(file, path, metadata)
    expected = {f"{Q}.weight": 25.0 * product(q), f"{K}.weight": 2.0 * product(k)}
    check(path, expected)
    run_tool({"tool": "metadata", "path": str(path), "strip": True, "out": str(out)})
    check(out, expected)


def test_a_copy_of_an_oft_still_says_how_it_is_meant(tmp_path: Path):
    numbers, home = draw(12, 6, size=0.1), tmp_path / "home"
    home.mkdir()
    path = home / "adapter_model.safetensors"
    save_file({f"base_model.model.{Q}.oft_R.weight": numbers}, path)
    (home / "adapter_config.json").write_text(json.dumps({"peft_type": "OFT", "use_cayley_neumann": False}))
    out = tmp_path / "away" / "copy.safetensors"
    run_tool({"tool": "metadata", "path": str(path), "strip": True, "out": str(out)})
    check(out, {f"{Q}.weight": turned(numbers, 4, exact=True)})
    with pytest.raises(Trouble, match="would do something else"):
        run_tool({"tool": "metadata", "path": str(out), "remove": ["lora_adapter_metadata"], "overwrite": True})
    for tool in ({"tool": "convert", "layout": "comfyui"}, {"tool": "resize", "rank": 2}):
        with pytest.raises(Trouble, match=r"OFT.*depends on the base model"):
            run_tool({**tool, "path": str(path), "family": "qwen_image", "out": str(tmp_path / "x.safetensors")})
    base = CASES / "models" / QWEN / "diffusion_pytorch_model.safetensors"
    baked = tmp_path / "baked.safetensors"
    run_tool({"tool": "bake", "base": str(base), "paths": [str(path)], "strengths": [1.0], "out": str(baked)})
    change = load_file(baked)[f"{Q}.weight"].double() - load_file(base)[f"{Q}.weight"].double()
    assert torch.allclose(change, turned(numbers, 4, exact=True), atol=1e-6)


def test_a_file_is_not_written_where_a_configuration_would_be_misread(tmp_path: Path):
    save_file(pair(Q), tmp_path / "only.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 16}))
    settings = {"path": str(tmp_path / "only.safetensors"), "out": str(tmp_path / "second.safetensors")}
    with pytest.raises(Trouble, match="only LoRA there"):
        run_tool({"tool": "metadata", "set": {"a": "b"}, **settings})
    save_file(pair(Q), tmp_path / "second.safetensors")
    receipt = lora.load(shared(QWEN), tmp_path / "only.safetensors")
    lora.clear(shared(QWEN))
    assert any("also other LoRAs" in note for note in receipt.notes)


def test_what_cannot_be_read_of_alpha_is_said(tmp_path: Path):
    path, factors = tmp_path / "adapter_model.safetensors", pair(Q)
    save_file(factors, path, {"lora_adapter_metadata": '{"transformer.lora_alpha": 8'})
    assert any("cannot be read" in note for note in check(path, {f"{Q}.weight": product(factors)}).notes)
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 8')
    refused(path, r"adapter_config\.json cannot be read", "damaged")


def test_pefts_lokr_of_whole_factors_acts_at_its_alpha(tmp_path: Path):
    left, right = draw(4, 4), draw(12, 12)
    path = tmp_path / "adapter_model.safetensors"
    save_file({f"base_model.model.{Q}.lokr_w1": left, f"base_model.model.{Q}.lokr_w2": right}, path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LOKR", "r": 32, "alpha": 8}))
    check(path, {f"{Q}.weight": 0.25 * torch.kron(left.double(), right.double())})


# 8-bit factors

SCALE_NAMES = (
    ("lora_A.weight", "lora_A.weight_scale"),
    ("lora_A.weight", "lora_A.scale_weight"),
    ("lora_A.weight", "lora_A.weight.scale"),
    ("lora_A.weight", "lora_A.weight.weight_scale"),
    ("lora_A.weight", "lora_A.scale"),
    ("lora_A.default.weight", "lora_A.default.weight_scale"),
    ("lora_down.weight", "lora_down.weight_scale"),
    ("lora_down.weight", "lora_down.scale_weight"),
    ("lora_A", "lora_A_scale"),
)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize(("factor", "scale"), SCALE_NAMES)
def test_scales_under_every_spelling(factor: str, scale: str, dtype: torch.dtype):
    def stored(values: torch.Tensor, amount: torch.Tensor) -> torch.Tensor:
        return (values / amount).round().clamp(-100, 100).to(dtype)

    names = [(name.replace("lora_A", "lora_B").replace("down", "up")) for name in (factor, scale)]
    amounts = (torch.tensor(0.02), torch.full((48, 1), 0.01) * (1 + torch.arange(48)[:, None] % 3))
    down, up = stored(draw(4, 48), amounts[0]), stored(draw(48, 4), amounts[1])
    file = {f"{Q}.{factor}": down, f"{Q}.{scale}": amounts[0], f"{Q}.{names[0]}": up, f"{Q}.{names[1]}": amounts[1]}
    change = (up.double() * amounts[1].double()) @ (down.double() * amounts[0].double())
    receipt = check(file, {f"{Q}.weight": change})
    assert not receipt.unused
    refused({key: tensor for key, tensor in file.items() if key != f"{Q}.{names[1]}"}, "no scale|int8", "not_supported")


def test_scales_of_whole_changes_and_of_other_algorithms():
    codes = (draw(48, 48) * 20).to(torch.float8_e4m3fn)
    change = {f"{Q}.weight": 0.05 * codes.double()}
    for name in ("diff_scale", "diff.weight_scale", "diff.scale_weight", "diff.scale"):
        check({f"{Q}.diff": codes, f"{Q}.{name}": torch.tensor([0.05])}, change)
    blocks = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    spread = blocks.repeat_interleave(16, 0).repeat_interleave(24, 1).double()
    check({f"{Q}.diff": codes, f"{Q}.diff_scale": blocks}, {f"{Q}.weight": codes.double() * spread})
    left, right = (draw(4, 4) * 50).to(torch.int8), draw(12, 12)
    file = {f"{Q}.lokr_w1": left, f"{Q}.lokr_w1_scale": torch.tensor(0.02), f"{Q}.lokr_w2": right}
    check(file, {f"{Q}.weight": torch.kron(0.02 * left.double(), right.double())})


def test_files_marked_as_scaled_without_scales_are_refused(tmp_path: Path):
    factors = {key: tensor.to(torch.float8_e4m3fn) for key, tensor in pair(Q).items()}
    marked = {**factors, "scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)}
    refused(marked, "marked as scaled", "not_supported")
    save_file(factors, tmp_path / "a.safetensors", {"_quantization_metadata": "{}"})
    refused(tmp_path / "a.safetensors", "marked as scaled", "not_supported")
    plain = {key: tensor.float() for key, tensor in factors.items()}
    check(factors, {f"{Q}.weight": product(plain)})


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"lora_A.weight_scale": torch.tensor(float("nan"))}, "NaN"),
        ({"lora_A.weight_scale": torch.ones(5)}, "shape"),
        ({"lora_A.weight_scale": torch.tensor(2.0), "lora_A.scale_weight": torch.tensor(3.0)}, "two scales"),
        ({"lora_A.weight_zero_point": torch.tensor(3.0)}, "not understood"),
        ({"lora_A.absmax": torch.ones(4)}, "not understood"),
        ({"lora_A.comfy_quant": torch.zeros(8, dtype=torch.uint8)}, "not understood"),
    ],
)
def test_scales_that_are_not_understood_are_refused(more: dict, words: str):
    file = {f"{Q}.{name}": tensor for name, tensor in more.items()}
    factors = {key: tensor.to(torch.float8_e4m3fn) for key, tensor in pair(Q).items()}
    refused({**factors, **file}, words, "not_supported")


# Whole parameters, embeddings, rank 0


def test_norms_that_a_control_lora_holds_whole_are_applied():
    model = shared("tiny_flux")
    before = snapshot(model)
    down, up, bias = draw(4, 32, size=0.3), draw(96, 4, size=0.3), draw(96)
    norm = draw(16).abs() + 0.5
    file = {
        "double_blocks.0.img_attn.qkv.lora_A.weight": down,
        "double_blocks.0.img_attn.qkv.lora_B.weight": up,
        "double_blocks.0.img_attn.qkv.lora_B.bias": bias,
        "double_blocks.0.img_attn.norm.query_norm.scale": norm,
    }
    attention = "transformer_blocks.0.attn"
    width = before[f"{attention}.norm_q.weight"].shape[0]
    file["double_blocks.0.img_attn.norm.query_norm.scale"] = norm = draw(width).abs() + 0.5
    names = [f"{attention}.to_{letter}" for letter in "qkv"]
    expected = {f"{attention}.norm_q.weight": norm.double() - before[f"{attention}.norm_q.weight"].double()}
    for name, rows, share in zip(names, (up.double() @ down.double()).chunk(3), bias.chunk(3), strict=True):
        expected |= {f"{name}.weight": rows, f"{name}.bias": share.double()}
    for hot in (False, True):
        receipt = lora.load(model, file, hot=hot)
        assert not receipt.unused and receipt.layers_applied == 2
        assert_acts_as(model, expected) if hot else assert_changed_by(model, before, expected)
        lora.clear(model)
        assert same(model, before)
    file["double_blocks.0.img_attn.norm.query_norm.scale"] = draw(width + 1)
    with pytest.raises(Trouble, match=r"norm\.query_norm"):
        lora.load(model, file)
    assert same(model, before)


def test_biases_that_peft_saves_whole_are_applied():
    factors, bias = pair(Q), draw(48)
    file = {
        **{f"base_model.model.{key}": tensor for key, tensor in factors.items()},
        f"base_model.model.{Q}.bias": bias,
    }
    before = snapshot(shared(QWEN))
    check(file, {f"{Q}.weight": product(factors), f"{Q}.bias": bias.double() - before[f"{Q}.bias"].double()})


@pytest.mark.parametrize("tokens", [16, 20])
@pytest.mark.parametrize(
    "names", [("lora_embedding_A", "lora_embedding_B"), ("lora_embedding_A.default", "lora_embedding_B.default")]
)
def test_pairs_of_embeddings_are_the_right_way_round(tokens: int, names: tuple[str, str]):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(tokens, 16)).requires_grad_(False)
    bare = torch.nn.Sequential(torch.nn.Embedding(tokens, 16)).requires_grad_(False)
    bare.load_state_dict(net.state_dict())
    model = peft.get_peft_model(net, peft.LoraConfig(r=3, lora_alpha=6, target_modules=["0"]))
    a, b = draw(3, tokens), draw(16, 3)
    layer = model.base_model.model[0]
    layer.lora_embedding_A["default"].data, layer.lora_embedding_B["default"].data = a, b
    words, before = torch.arange(tokens), bare[0].weight.clone()
    file = {
        f"base_model.model.0.{names[0]}": a,
        f"base_model.model.0.{names[1]}": b,
        "base_model.model.0.alpha": torch.tensor(6.0),
    }
    for hot in (False, True):
        lora.load(bare, file, hot=hot)
        torch.testing.assert_close(bare(words), model(words), rtol=1e-5, atol=1e-5)
        lora.clear(bare)
    assert torch.equal(bare[0].weight, before)


def test_a_pair_of_rank_0_is_left_out_with_a_note():
    empty = {
        f"{K}.lora_A.weight": torch.ones(0, 48),
        f"{K}.lora_B.weight": torch.ones(48, 0),
        f"{K}.alpha": torch.tensor(1.0),
    }
    factors = pair(Q)
    receipt = check({**factors, **empty}, {f"{Q}.weight": product(factors)})
    assert any("rank 0" in note for note in receipt.notes) and "rank 0" in receipt.unused[K]
    bias = {f"{K}.diff_b": draw(48)}
    check({**factors, **empty, **bias}, {f"{Q}.weight": product(factors), f"{K}.bias": bias[f"{K}.diff_b"].double()})
    refused(empty, "changes nothing", "no_keys_match")
    refused({**factors, f"{K}.lora_A.weight": torch.ones(0, 48), f"{K}.lora_B.weight": torch.ones(48, 2)}, "empty|rank")
