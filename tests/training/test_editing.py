"""Training models that edit: what a sample is edited from goes with it through cuts, mirrors, batches, stages and samples."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from PIL import Image, ImageChops, ImageOps, ImageStat
from safetensors import safe_open
from safetensors.torch import load_file

pytestmark = pytest.mark.torch
BASE = ("--max_steps", 2, "--save_dtype", "float32")


@pytest.fixture
def train(run_training, tiny_edit: Path, pairs: Path):
    def run(
        output: Path,
        *flags,
        model: Path = tiny_edit,
        dataset: Path | None = pairs,
        table: Path | None = pairs / "m.json",
    ) -> int:
        named = ("--dataset_metadata_path", table) if table else ()
        return run_training(output, *BASE, *named, *flags, model=model, dataset=dataset)

    return run


def losses(run: Path, events) -> list[float]:
    return [event["loss"] for event in events(run) if event["event"] == "step"]


def by_hand(model: Path, folder: Path, places: list[int]) -> float:
    """The mean error of the first steps of samples at `places`, by diffusers' networks, as they stand in DiffSynth's documents: the tokens
    of what is edited behind those of what is learnt."""
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel

    from backend.catalog.models.identify import identify_model
    from backend.dataset.bucket_sampler import epoch_batches
    from backend.dataset.dataset import Item
    from backend.engine.loading.load import load_part
    from backend.families import FAMILIES, qwen_image
    from backend.families.qwen_image.reference_geometry import size_within
    from backend.schema.training.config import LossSection
    from backend.training.model.flow_matching_loss import draw, training_levels

    spec = identify_model(model, FAMILIES)
    parts = {name: load_part(spec.parts[name], dtype=torch.float32) for name in ("text_encoder", "vision")}
    parts |= {
        "tokenizer": qwen_image.load_tokenizer(spec.tokenizer),
        "processor": qwen_image.load_processor(spec.processor, spec.variant),
    }
    vae = AutoencoderKLQwenImage.from_pretrained(model / "vae")
    dit = QwenImageTransformer2DModel.from_pretrained(model / "transformer")
    mean, std = (
        torch.tensor(value).view(1, -1, 1, 1, 1) for value in (vae.config.latents_mean, vae.config.latents_std)
    )

    def latents(picture: Image.Image) -> torch.Tensor:
        values = torch.tensor(list(picture.convert("RGB").getdata()), dtype=torch.float32).view(
            picture.height, picture.width, 3
        )
        pixels = (values / 127.5 - 1).permute(2, 0, 1)[None, :, None]
        return ((vae.encode(pixels).latent_dist.mode() - mean) / std)[:, :, 0]

    def packed(x: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = x.shape
        x = x.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
        return x.reshape(batch, height * width // 4, channels * 4)

    rows, found = json.loads((folder / "m.json").read_text()), []
    items = [Item(Path(), ("",)) for _ in rows]
    batches = epoch_batches(items, [0] * len(rows), batch_size=1, repeat=1, prior_share=0.5, seed=0, epoch=0)
    number_at = {batch.places[0]: batch.items[0] for batch in batches}
    with torch.no_grad():
        for place in places:
            row = rows[number_at[place]]
            target = latents(Image.open(folder / row["image"]))
            named = row["edit_image"] if isinstance(row["edit_image"], list) else [row["edit_image"]]
            edited = [Image.open(folder / name) for name in named]
            embeds = qwen_image.encode_text(parts, [row["prompt"]], pictures=[edited])[0]["embeds"][None]
            sized = [one.resize(size_within(one.size, 64 * 64), Image.Resampling.LANCZOS) for one in edited]
            references = [latents(one) for one in sized]
            levels = training_levels(qwen_image.TRAINING_SCHEDULE)
            draws = draw(tuple(target.shape[1:]), (place,), LossSection(), seed=0, schedule=levels)
            sigma = draws.sigma.view(-1, 1, 1, 1)
            x = (1 - sigma) * target + sigma * draws.noise
            tokens = torch.cat([packed(one) for one in (x, *references)], dim=1)
            shapes = [[(1, one.shape[2] // 2, one.shape[3] // 2) for one in (x, *references)]]
            velocity = dit(
                hidden_states=tokens,
                timestep=draws.sigma,
                encoder_hidden_states=embeds,
                img_shapes=shapes,
                encoder_hidden_states_mask=torch.ones(embeds.shape[:2], dtype=torch.bool),
            ).sample
            wanted = packed(draws.noise - target)
            bell = torch.exp(-2 * (torch.cat([draws.sigma, levels]) - 0.5) ** 2)
            bell = (bell - bell.min()) / (bell[1:] - bell.min()).mean()
            found.append(float(((velocity[:, : wanted.shape[1]] - wanted) ** 2).mean() * bell[0]))
    return sum(found) / len(found)


def test_the_first_loss_is_that_of_diffusers_networks(train, events, tmp_path: Path, tiny_edit: Path, pairs: Path):
    plain = ("--mixed_precision", "no", "--learning_rate", 0, "--max_steps")
    assert train(tmp_path / "one", *plain, 3) == 0
    batches = losses(tmp_path / "one", events)
    assert sum(batches) / 3 == pytest.approx(by_hand(tiny_edit, pairs, [0, 1, 2]), rel=1e-4)
    assert train(tmp_path / "two", *plain, 2, "--batch_size", 2) == 0  # two of one shape go together, the third alone
    found = sorted(losses(tmp_path / "two", events))
    ways = [sorted([batches[alone], (sum(batches) - batches[alone]) / 2]) for alone in range(3)]
    assert any(found == pytest.approx(way, rel=1e-4) for way in ways)


def test_two_stages_give_what_one_gives(train, tmp_path: Path, tiny_edit: Path, capsys):
    """With samples mirrored and captions left out, both of which change what is told of the pictures."""
    flags = ("--caption_dropout", 0.4, "--flip", "--dataset_repeat", 4, "--max_steps", 4)
    assert train(tmp_path / "one", *flags) == 0
    assert train(tmp_path / "data", *flags, "--task", "sft:data_process") == 0
    alone = tmp_path / "only_dit"
    alone.mkdir()
    for name in ("transformer", "tokenizer", "processor", "scheduler"):
        shutil.copytree(tiny_edit / name, alone / name)
    shutil.copy(tiny_edit / "model_index.json", alone)
    again = (*flags, "--task", "sft:train")
    assert train(tmp_path / "two", *again, model=alone, dataset=tmp_path / "data", table=None) == 0
    one, two = (load_file(tmp_path / name / "step-4.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    (alone / "model_index.json").write_text((tiny_edit / "model_index.json").read_text().replace("EditPlus", "Edit"))
    assert train(tmp_path / "two", *again, model=alone, dataset=tmp_path / "data", table=None) == 2
    assert "of the variant edit-2509, which sees pictures otherwise than Qwen-Image-Edit" in capsys.readouterr().err
    shutil.copy(tiny_edit / "model_index.json", alone)
    assert (
        train(tmp_path / "two", *again, "--sample_prompts", "x", model=alone, dataset=tmp_path / "data", table=None)
        == 2
    )
    assert "Name them with --sample_edit_images" in capsys.readouterr().err


def test_samples_begin_from_pictures_and_are_what_the_engine_draws_with_the_lora(
    train, events, tmp_path: Path, tiny_edit: Path, pairs: Path
):
    from backend.catalog.models.identify import identify_model
    from backend.engine.pipeline.pipeline import Pipeline
    from backend.families import FAMILIES
    from backend.schema.request import GenerationRequest, LoraUse

    flags = (
        "--learning_rate",
        0.02,
        "--mixed_precision",
        "no",
        "--sample_inference_steps",
        2,
        "--sample_prompts",
        "make it red\nturn it",
    )
    named = f"{pairs / 'wide.png'}, {pairs / 'old_a.png'}"
    assert (
        train(tmp_path / "turn", *flags) == 0 and train(tmp_path / "named", *flags, "--sample_edit_images", named) == 0
    )
    drawn = {}
    for run in ("turn", "named"):
        for event in events(tmp_path / run):
            if event["event"] == "sample":
                drawn[run, event["prompt"], event["step"]] = Image.open(event["path"])
    assert len(drawn) == 8 and len({picture.tobytes() for picture in drawn.values()}) == 8
    assert {drawn["turn", "turn it", 2].size, drawn["named", "turn it", 2].size} == {(64, 64)}
    first = next(event["event"] for event in events(tmp_path / "turn") if event["event"] in ("sample", "step"))
    assert first == "sample"  # the first are drawn before the first step
    with safe_open(tmp_path / "named" / "step-2.safetensors", "pt") as file:
        assert "wide.png" not in json.dumps(file.metadata())  # no paths of this machine
    pipeline = Pipeline(identify_model(tiny_edit, FAMILIES), dtype=torch.float32, device="cpu")
    both = (str(pairs / "wide.png"), str(pairs / "old_a.png"))
    request = GenerationRequest(
        prompt="make it red",
        negative_prompt=" ",
        edit_images=both,
        width=64,
        height=64,
        num_inference_steps=2,
        guidance=3.0,
        seed=0,
    )
    plain = pipeline.generate(request)[0]
    pipeline.adapters.use([LoraUse(str(tmp_path / "named" / "step-2.safetensors"))])
    assert (
        apart(pipeline.generate(request)[0], drawn["named", "make it red", 2])
        < 0.02
        < 1
        < apart(plain, drawn["named", "make it red", 2])
    )
    assert apart(plain, drawn["named", "make it red", 0]) < 0.02


def apart(one: Image.Image, two: Image.Image) -> float:
    """Mean difference of two pictures, of 255."""
    return sum(ImageStat.Stat(ImageChops.difference(one, two)).mean) / 3


def test_a_text_encoder_sees_the_pictures_while_it_trains(train, events, tmp_path: Path):
    plain = ("--mixed_precision", "no", "--max_steps", 1)
    assert train(tmp_path / "dit", *plain) == 0
    assert (
        train(
            tmp_path / "text",
            *plain,
            "--lora_base_model",
            "text_encoder",
            "--lora_target_modules",
            "q_proj",
            "--sample_prompts",
            "x",
            "--sample_inference_steps",
            1,
        )
        == 0
    )
    assert losses(tmp_path / "dit", events) == pytest.approx(losses(tmp_path / "text", events), rel=1e-4)
    assert any("q_proj" in name for name in load_file(tmp_path / "text" / "step-1.safetensors"))


def test_prior_pictures_validation_preflight_and_little_memory(train, events, tmp_path: Path):
    flags = (
        "--prior_pictures",
        3,
        "--validation_split",
        0.3,
        "--preflight",
        "--fp8_models",
        "dit,text_encoder,vision",
        "--batch_size",
        2,
        "--use_gradient_checkpointing",
        "--edit_pixels",
        2048,
    )
    assert train(tmp_path / "run", *flags) == 0
    said = [event["event"] for event in events(tmp_path / "run")]
    assert "validation" in said and said[-1] == "finished"


def test_a_picture_that_breaks_off_is_named_or_left_out_with_its_sample(
    train, events, tmp_path: Path, pairs: Path, capsys
):
    shutil.copytree(pairs, tmp_path / "set")
    table, torn = tmp_path / "set" / "m.json", tmp_path / "set" / "old_b.jpg"
    Image.open(pairs / "old_b.png").resize((256, 256)).save(torn)
    torn.write_bytes(torn.read_bytes()[:-1500])  # its header is whole
    table.write_text(table.read_text().replace("old_b.png", torn.name))
    flags = {"dataset": tmp_path / "set", "table": table}
    assert train(tmp_path / "run", "--max_steps", 1, **flags) == 2
    assert "old_b.jpg cannot be read" in capsys.readouterr().err
    assert train(tmp_path / "run", "--max_steps", 1, "--skip_broken_pictures", **flags) == 0
    notes = [event["message"] for event in events(tmp_path / "run") if event["event"] == "note"]
    assert sum("Left out" in note and torn.name in note for note in notes) == 1


@pytest.mark.parametrize(
    ("model", "flags", "words"),
    [
        (
            "text",
            ("--extra_inputs", "edit_image"),
            "Qwen-Image makes pictures of text alone, so it cannot be trained to edit",
        ),
        (
            "no dit",
            ("--extra_inputs", "edit_image", "--task", "sft:data_process"),
            "is told by the model's transformer",
        ),
        ("text", ("--sample_edit_images", "a.png"), "drawn from no others (--sample_edit_images)"),
        ("text", ("--processor_path", "x"), "it has no processor of pictures"),
        ("edit", ("--dataset_metadata_path", "plain.json"), "does not say which picture it is edited from"),
        ("edit", ("--regularisation_path", "."), "edited from nothing, and Qwen-Image-Edit-2509 edits"),
        ("edit", ("--zero_cond_t",), "as free of noise"),
        (
            "edit",
            ("--crops", "3", "--crop_zoom", "2", "--max_pixels", "1024"),
            "wide.png, which it is edited from, has other proportions",
        ),
        (
            "edit",
            ("--sample_prompts", "x\ny\nz", "--sample_edit_images", "a.png\nb.png"),
            "There are 3 sample prompts but 2 lines",
        ),
        (
            "edit",
            ("--sample_prompts", "x", "--sample_edit_images", ","),
            "A line of --sample_edit_images names no picture: ','",
        ),
        ("edit", ("--processor_path", "nowhere"), "The processor of Qwen-Image-Edit-2509 was not found (nowhere)"),
        ("edit", ("--num_frames", "5"), "there are no 5 frames to train"),
        ("one", (), "works from one picture, and c.png is edited from 2"),
    ],
)
def test_what_does_not_go_together(
    train, tmp_path, pairs, tiny_qwen, tiny_edit, monkeypatch, capsys, model, flags, words
):
    (pairs / "plain.json").write_text(json.dumps([{"image": "a.png", "prompt": "x"}]))
    monkeypatch.chdir(pairs)
    monkeypatch.setattr("backend.training.setup.load_parts", lambda *a, **k: pytest.fail("weights were loaded"))
    folder = {"text": tiny_qwen, "edit": tiny_edit, "no dit": tiny_edit / "text_encoder"}.get(model)
    if folder is None:  # Qwen-Image-Edit takes one picture
        folder = tmp_path / "one"
        shutil.copytree(tiny_edit, folder)
        index = json.loads((folder / "model_index.json").read_text())
        (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": "QwenImageEditPipeline"}))
    assert train(tmp_path / "run", *flags, model=folder) == 2
    assert words in capsys.readouterr().err


def test_cuts_and_mirrors_lie_over_each_other(tmp_path: Path):
    """The edit picture is twice as large and the negative of its sample, so that in every view it has to be again."""
    from backend.dataset.crops import cut
    from backend.dataset.dataset import Item, measure
    from backend.dataset.reference_images import reference_sizes, shown, whole
    from backend.families import qwen_image
    from backend.schema.messages import Trouble
    from backend.training.encoding.encoding_cache import open_pixels
    from backend.training.encoding.open_images import open_reference

    picture = Image.radial_gradient("L").resize((200, 120)).rotate(20).convert("RGB")
    picture.save(tmp_path / "a.png")
    ImageOps.invert(picture).resize((400, 240), Image.Resampling.LANCZOS).save(tmp_path / "old.png")
    Image.new("RGB", (808, 8)).save(tmp_path / "strip.png")
    with pytest.raises(Trouble, match=r"^strip\.png: A picture of 808 x 8 pixels is too narrow"):
        reference_sizes(whole(measure([tmp_path / "strip.png"])), qwen_image, pixels=4096)
    (found,) = measure([tmp_path / "a.png"])
    item = Item(found.path, ("",), found.width, found.height, found.digest, edits=measure([tmp_path / "old.png"]))
    seen = set()
    for size in ((48, 80), (64, 64)):
        for flip in (False, True):
            for place in range(3):
                pixels = open_pixels(item, size, flip=flip, box=cut(item, size, place, zoom=2.0))
                (one,) = shown(item, size, flip=flip, place=place, zoom=2.0)
                opened = open_reference(one)
                assert opened.size == one.size and one.size[0] * size[0] == one.size[1] * size[1]
                seen.add((one.size, one.box, one.flip))
                small = (
                    torch.tensor(list(opened.resize(size[::-1]).getdata()), dtype=torch.float32)
                    .view(*size, 3)
                    .permute(2, 0, 1)
                )
                assert float((small / 127.5 - 1 + pixels).abs().mean()) < 0.04
    assert len(seen) == 12
