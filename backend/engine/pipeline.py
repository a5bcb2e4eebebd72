"""A loaded model and what is done with it: encode, denoise, decode, one phase after the other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from PIL import Image

from backend import families
from backend.catalog.spec import ModelSpec
from backend.engine import Cancelled, drawing, faster, load, lora, memory, native_fp8, pictures, shortage
from backend.engine.preview import Preview, Step, watched
from backend.schema.messages import Trouble
from backend.schema.request import GenerationRequest, LoraReceipt, LoraUse
from backend.schema.vram import VramConfig

KEPT_ENCODINGS = 64


class Pipeline:
    """The parts of one model on one device.

    `parts` holds the modules by name and the tokenizer; `placements` those whose weights are moved about. Parts may be missing:
    a pipeline of a transformer alone loads, and says what it lacks when it is asked for a picture. `compile` only makes sure, before
    anything is loaded, that requests may ask for it; `fp8_products` stores the transformer so that they may ask for those.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "auto",
        configs: dict[str, VramConfig] | None = None,
        vram_limit_bytes: int | None = None,
        tiled_vae: bool = False,
        halves_apart: bool = False,
        resident_blocks: dict[str, tuple[int, ...]] | None = None,
        compile: bool = False,
        fp8_products: bool = False,
        on_bytes: Callable[[str, int, int], None] | None = None,
    ):
        self.spec, self.dtype, self.device = spec, dtype, memory.check_device(str(device))
        faster.check(self.device, compile=compile, fp8_products=fp8_products)
        self.family, self.fp8_products = families.by_name(spec.family), fp8_products
        self.tiled_vae = tiled_vae
        self.notes: list[str] = []
        self.on_phase: Callable[[str], None] | None = None  # told the phase when its parts are where they compute, and "" after it
        self.parts: dict[str, object] = {}
        self.placements: dict[str, object] = {}
        self._encodings: OrderedDict[str, dict] = OrderedDict()
        self._text_changed = False
        self._preview = Preview(self.family, self.parts, self.placements, device=self.device, dtype=self.dtype)
        self.together = not halves_apart  # the halves of guidance
        self._resident_blocks = resident_blocks or {}  # of parts that are streamed, the blocks that stay
        for name in spec.parts:
            self._load(name, (configs or {}).get(name, VramConfig()), vram_limit_bytes, on_bytes)
        modules = {name: self.parts[name] for name in spec.parts}
        self.adapters = lora.Adapters(modules, family=self.family, specs=spec.parts, families=families.FAMILIES)
        if spec.tokenizer is not None and hasattr(self.family, "load_tokenizer"):
            self.parts["tokenizer"] = self.family.load_tokenizer(spec.tokenizer)

    def _load(self, name: str, config: VramConfig, vram_limit_bytes: int | None, on_bytes) -> None:
        part = self.spec.parts[name]
        tell = (lambda done, total: on_bytes(name, done, total)) if on_bytes else None
        multiplies = self.fp8_products and name == faster.PART
        config = native_fp8.stored(config, part) if multiplies else config
        if not config.managed and vram_limit_bytes is None:
            module = load.load_part(part, dtype=self.dtype, device=self.device, on_bytes=tell)
        else:
            from backend.engine import placement

            module = load.build_meta(part)
            config = with_defaults(config, self.dtype, self.device)
            self.placements[name] = placement.place(
                module, part, config, vram_limit_bytes=vram_limit_bytes, device=self.device, on_bytes=tell,
                resident=self._resident_blocks.get(name),
            )  # fmt: skip
            if multiplies:
                native_fp8.prepare(self.placements[name])
        if hasattr(self.family, "prepare"):
            self.family.prepare(name, module)
        self.parts[name] = module

    @contextmanager
    def using(self, *names: str) -> Iterator[None]:
        """Within it the parts `names` may be called; every other placed part is parked first."""
        for name in names:
            if name not in self.parts:
                raise Trouble(
                    "missing_part",
                    f"This needs the part {name}, which was not loaded.",
                    hint=f"Add its file: {self.family.PARTS[name].folder}." if name in self.family.PARTS else "",
                )
        for name, placement in self.placements.items():
            if name not in names:
                placement.offload()
        for name in names:
            if name in self.placements:
                self.placements[name].onload()
        tell = self.on_phase if names[0] in self.family.PARTS else None
        if tell:
            tell(self.family.PARTS[names[0]].phase)
        yield
        if tell:
            tell("")

    @torch.no_grad()
    def encode_prompt(self, prompt: str) -> dict:
        """The encoding of `prompt` on the device; the text encoder runs only for prompts not seen lately."""
        if prompt in self._encodings:
            self._encodings.move_to_end(prompt)
            return self._encodings[prompt]
        with self.using("text_encoder", "tokenizer"):
            encoding = self.family.encode_text(self.parts, [prompt], device=self.device)[0]
        self._encodings[prompt] = {name: tensor.to(self.dtype).clone() for name, tensor in encoding.items()}
        while len(self._encodings) > KEPT_ENCODINGS:
            self._encodings.popitem(last=False)
        if max(map(len, encoding.values())) >= self.family.MAX_TOKENS:
            self.note(
                f"The prompt is too long: what comes after the first {self.family.MAX_TOKENS} tokens was not read."
            )
        return self._encodings[prompt]

    def forget_prompts(self) -> None:
        """After LoRAs came or went: drops the encodings if the text encoder's weights were or are changed by one."""
        text = {name for name, part in self.family.PARTS.items() if part.phase == "text"}
        changed = any(text & set(one.hot) for one in self.adapters.loaded)
        if changed or self._text_changed:
            self._encodings.clear()
        self._text_changed = changed

    @torch.no_grad()
    def encode_picture(self, picture: Image.Image, width: int, height: int, generator=None) -> torch.Tensor:
        """Normalised latents (1, C, h, w) of a picture: the mean, or a sample by a CPU `generator`."""
        with self.using("vae"):
            pixels = pictures.to_pixels(picture, width, height).to(self.device, self.dtype)
            return self.family.encode_image(self.parts, pixels, generator=generator).to(self.dtype)

    @torch.no_grad()
    def decode(self, latents: torch.Tensor, *, tiled: bool | tuple[int, int] | None = None) -> Image.Image:
        """The picture of latents (1, C, h, w); in tiles where asked, or where memory runs out without."""
        tiled = self.tiled_vae if tiled is None else tiled
        with self.using("vae"):
            try:
                pixels = self.family.decode(self.parts, latents.to(self.dtype), tiled=tiled)
            except (RuntimeError, MemoryError) as error:
                if tiled or not shortage.is_one(error):
                    raise
                pixels = None  # the retry is outside, where the error no longer holds the memory
            if pixels is None:
                memory.give_back(self.device)
                self.note("Memory ran out while the picture was decoded, so it was done again in tiles.")
                pixels = self.family.decode(self.parts, latents.to(self.dtype), tiled=True)
        picture = pictures.to_picture(pixels[0])
        self._preview.learn(latents, pixels)
        return picture

    def note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)

    def generate(
        self,
        request: GenerationRequest,
        *,
        on_step: Callable[[Step], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        noise: torch.Tensor | None = None,
        tiled: bool | tuple[int, int] | None = None,
    ) -> list[Image.Image]:
        """The pictures of `request`. Raises Cancelled within one step of `should_stop()`, Trouble otherwise."""
        return list(self.draw(request, on_step=on_step, should_stop=should_stop, noise=noise, tiled=tiled))

    def draw(
        self,
        request: GenerationRequest,
        *,
        on_step: Callable[[Step], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        source: Image.Image | None = None,
        noise: torch.Tensor | None = None,
        tiled: bool | tuple[int, int] | None = None,
    ) -> Iterator[Image.Image]:
        """As `generate`, one picture after the other. `noise` (1, C, h, w) replaces that of the first picture's seed, `source`
        the request's input picture.

        Each picture is drawn by itself, so that picture 3 of 4 comes out the same when its seed is asked for alone.
        """
        drawing.check(self, request)
        faster.arrange(self, request)
        if source is None and request.input_image:
            source = pictures.open_picture(request.input_image)
        towards = self.encode_prompt(request.prompt)
        away = self.encode_prompt(request.negative_prompt) if request.guidance > 1 else None
        if on_step and self._preview.must_learn(request.width, request.height):
            with self.using("vae"):
                self._preview.learn_from_noise()
        for number in range(request.count):
            if should_stop and should_stop():
                raise Cancelled
            start = drawing.start(self, request, request.seed + number, source, noise if number == 0 else None)
            watch = on_step and watched(number, len(start[1]) - 1, on_step, self._preview)
            latents = drawing.denoise(self, request, *start, towards, away, watch, should_stop)
            yield self.decode(latents, tiled=tiled)

    def add_lora(self, part: str, source, *, strength: float = 1.0, hot: bool | None = None) -> LoraReceipt:
        """Adds a LoRA (a file or a state dict) to `part`, and its text encoder half to the text encoder if that is loaded."""
        receipt = self.adapters.add(source, strength=strength, hot=hot, part=part)
        self.forget_prompts()
        return receipt

    def set_lora_strength(self, which: LoraReceipt | str, strength: float) -> LoraReceipt:
        """The same LoRA (its receipt, path or name) at another strength, without loading it again."""
        self.forget_prompts()
        return self.adapters.set_strength(which, strength)

    def remove_lora(self, which: LoraReceipt | str) -> None:
        """Takes one LoRA off; the others stay."""
        self.forget_prompts()
        self.adapters.remove(which)

    def clear_loras(self, part: str | None = None) -> None:
        """Takes all LoRAs off (of one part, or of all): every weight is the file's again, bit for bit."""
        self.forget_prompts()
        self.adapters.clear(part)

    def prefer_hot(self, part: str | None = None) -> None:
        """From now on LoRAs act beside the weights (of one part, or of all) unless it is said otherwise."""
        self.adapters.prefer_hot(part)

    def use_loras(self, uses: Sequence[LoraUse]) -> tuple[LoraReceipt, ...]:
        """Makes exactly the LoRAs `uses` act, with one receipt each."""
        before = self.adapters.receipts
        receipts = self.adapters.use(uses)
        if receipts != before:
            self.forget_prompts()
        return receipts

    def close(self) -> None:
        """Gives the memory back; the pipeline cannot be used afterwards."""
        for placement in self.placements.values():
            placement.close()
        self.adapters.close()
        self.placements.clear()
        self.parts.clear()
        self._encodings.clear()
        memory.give_back(self.device)


def with_defaults(config: VramConfig, dtype: torch.dtype, device: torch.device) -> VramConfig:
    """`config` with what was left open: it computes in `dtype` on `device`."""
    return replace(
        config,
        computation_dtype=config.computation_dtype or str(dtype).removeprefix("torch."),
        computation_device=config.computation_device or str(device),
    )
