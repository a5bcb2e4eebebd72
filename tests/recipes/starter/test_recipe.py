"""The networks of the starter's making against the stock classes."""

import json

import pytest

torch = pytest.importorskip("torch")

from recipes.starter import assemble_model, text_encoder, train_vae, vae_2d

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def autoencoder():
    from diffusers import AutoencoderKLQwenImage

    model = AutoencoderKLQwenImage(**vae_2d.CONFIG)
    vae_2d.start(model, torch.Generator().manual_seed(0))
    return model


def test_two_dimensional_kernels_are_the_stock_autoencoder(autoencoder):
    flat = vae_2d.flatten(autoencoder)
    x = torch.rand(1, 3, 48, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.no_grad():
        moments = autoencoder._encode(x[:, :, None])[:, :, 0]
        mean, log_variance = vae_2d.encode(flat, x)
        assert (moments - torch.cat([mean, log_variance], 1)).abs().max() < 3e-6
        stock = autoencoder._decode(mean[:, :, None]).sample[:, :, 0]
        assert (stock - vae_2d.decode(flat, mean).clamp(-1, 1)).abs().max() < 1e-5


def test_trained_kernels_go_back_into_the_last_time_slice(autoencoder):
    flat = vae_2d.flatten(autoencoder)
    with torch.no_grad():
        flat["decoder.conv_in.weight"].add_(1)
    vae_2d.unflatten(autoencoder, flat)
    weight = autoencoder.decoder.conv_in.weight
    assert torch.equal(weight[:, :, -1], flat["decoder.conv_in.weight"]) and not weight[:, :, :-1].any()


def test_a_step_lowers_the_loss_on_its_own_batch(autoencoder):
    torch.manual_seed(0)
    flat = vae_2d.flatten(autoencoder)
    x = torch.rand(2, 3, 32, 32) * 2 - 1
    optimiser = torch.optim.AdamW(flat.values(), lr=1e-3)
    losses = []
    for _ in range(6):
        loss = train_vae.objective(flat, x, halved=False)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    captions = [
        f"a {thing} on a {colour} background"
        for thing in ("cat", "dog", "car", "rose", "house")
        for colour in ("red", "green", "blue", "white")
    ] * 5
    return text_encoder.make_tokenizer(captions, tmp_path_factory.mktemp("tokenizer"))


def test_the_templates_begin_with_as_many_tokens_as_the_stock_pipelines_cut(tokenizer):
    text_encoder.check_prefixes(tokenizer)
    first, edit = text_encoder.templates()
    assert len(tokenizer(first.split("{}")[0]).input_ids) == 34
    assert tokenizer(edit.split("{}")[0]).input_ids.index(tokenizer.convert_tokens_to_ids("<|vision_start|>")) == 64


def test_sharing_the_templates_start_changes_nothing(tokenizer):
    encoder = text_encoder.make_encoder(tokenizer).eval()
    prompts = ["a cat on a red background", "rose", ""]
    whole = tokenizer(
        [text_encoder.templates()[0].format(prompt) for prompt in prompts], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        plain = encoder.model(**whole).last_hidden_state
        shared = text_encoder.suffix_states(encoder, tokenizer, prompts)
    for row, (states, mask) in enumerate(zip(plain, whole.attention_mask, strict=True)):
        end = int(mask.sum())
        assert (states[end - text_encoder.SUFFIX_TOKENS : end] - shared[row]).abs().max() < 1e-5


def test_a_fresh_transformer_predicts_nothing_yet():
    model = assemble_model.fresh_transformer()
    with torch.no_grad():
        out = model(
            hidden_states=torch.randn(1, 16, 64),
            encoder_hidden_states=torch.randn(1, 7, 192),
            timestep=torch.tensor([0.5]),
            img_shapes=[[(1, 4, 4)]],
            return_dict=False,
        )[0]
    assert out.shape == (1, 16, 64) and not out.any()


def test_trained_weights_are_put_in_their_places_and_strange_ones_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    base = tmp_path / "base"
    for part, names in (
        ("transformer/diffusion_pytorch_model", ["img_in.weight"]),
        ("text_encoder/model", ["model.norm.weight", "visual.x"]),
    ):
        path = base / f"{part}.safetensors"
        path.parent.mkdir(parents=True)
        save_file({name: torch.zeros(3, dtype=torch.bfloat16) for name in names}, path)
    (base / "transformer" / "config.json").write_text(json.dumps({"_name_or_path": "/home/x", "a": 1}))
    good = {"dit.img_in.weight": torch.ones(3), "text_encoder.norm.weight": torch.full((3,), 2.0)}
    save_file(good, tmp_path / "good.safetensors")
    assemble_model.install(tmp_path / "good.safetensors", base, tmp_path / "out")
    assert load_file(tmp_path / "out/transformer/diffusion_pytorch_model.safetensors")["img_in.weight"].tolist() == [
        1,
        1,
        1,
    ]
    text = load_file(tmp_path / "out/text_encoder/model.safetensors")
    assert text["model.norm.weight"].tolist() == [2, 2, 2] and not text["visual.x"].any()
    assert json.loads((tmp_path / "out/transformer/config.json").read_text()) == {"a": 1}
    save_file(good | {"dit.other": torch.ones(1)}, tmp_path / "strange.safetensors")
    with pytest.raises(ValueError, match="1 have no place"):
        assemble_model.install(tmp_path / "strange.safetensors", base, tmp_path / "out2")
