"""A loaded model and what is done with it: encode, denoise, decode, one phase after the other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from PIL import Image

from backend import families
from backend.catalog.family import DrawSettings, Encoding, Latents, each_stream, settings_of
from backend.catalog.spec import ModelSpec
from backend.engine.acceleration import apply, fp8_matmul
from backend.engine.devices import device_memory
from backend.engine.loading import check_finite, load
from backend.engine.lora import adapters
from backend.engine.offload.placement import Placement
from backend.engine.pipeline import denoise, image_tensors, oom_fallback, part_loading, part_placement, request_checks
from backend.engine.pipeline.latent_preview import Preview, Step, watched
from backend.engine.pipeline.part_loading import Loading
from backend.engine.pipeline.sampler import num_steps
from backend.schema.memory_plan import VramConfig
from backend.schema.messages import Cancelled, Trouble
from backend.schema.request import GenerationRequest, LoraReceipt, LoraUse

KEPT_ENCODINGS = 64


class Pipeline:
    """The parts of one model on one device.

    `parts` holds the modules by name, the tokenizer and the processor of pictures; `placements` those whose weights are
    moved about. Parts may be missing: a pipeline of a transformer alone loads, and says what it lacks when it is asked
    for a picture. `compile` only makes sure, before anything is loaded, that requests may ask for it; `fp8_products`
    stores the transformer so that they may ask for those. `allow_fp8`: weights may be stored in FP8 where memory runs
    out, `allow_tiles`: pictures may go through the autoencoder in tiles. What is done then is in `oom_fallback`.
    `loading`: parts whose weights are not simply those of their files.
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
        allow_fp8: bool = False,
        allow_tiles: bool = True,
        loading: Mapping[str, Loading] | None = None,
        on_bytes: Callable[[str, int, int], None] | None = None,
    ):
        self.spec, self.dtype, self.device = spec, dtype, device_memory.check_device(str(device))
        apply.check(self.device, compile=compile, fp8_products=fp8_products)
        self.family, self.fp8_products = families.by_name(spec.family), fp8_products
        self.tiled_vae = tiled_vae
        self.notes: list[str] = []
        # called with a phase's name when its parts are on their device, and with "" after it
        self.on_phase: Callable[[str], None] | None = None
        self.parts: dict[str, Any] = {}  # networks, tokenizers and the processor, by name
        self.placements: dict[str, Placement] = {}
        self._encodings: OrderedDict[tuple, dict] = OrderedDict()
        self._text_changed = False
        self._preview = Preview(self.family, self.parts, self.placements, device=self.device, dtype=self.dtype)
        self.together = not halves_apart  # the halves of guidance
        self.lower = oom_fallback.Lower(
            allow_fp8 and oom_fallback.FP8 in device_memory.probe(self.device).dtypes, allow_tiles
        )
        self.configs, self.limit_bytes = dict(configs or {}), vram_limit_bytes
        self.resident_blocks = dict(resident_blocks or {})  # of parts that are streamed, the blocks that stay
        self.schedule: dict[
            str, object
        ] = {}  # of the scheduler's configuration, what is otherwise for the next pictures
        self.loading = dict(loading or {})  # of parts that are quantized, given as a state dict, or empty
        self.packed: dict[str, Callable[[str], bool]] = {}  # part that is quantized and moved -> which weights
        for name, said in self.loading.items():
            moved = self.configs.get(name, VramConfig()).managed
            part_loading.check(name, said, moved=moved, fp8_products=fp8_products and name == apply.PART)
        kept = {name: part for name, part in spec.parts.items() if not self._is_own(name)}
        self.adapters = adapters.Adapters({}, family=self.family, specs=kept, families=families.FAMILIES)
        try:
            self._load_all(on_bytes)
        except BaseException:  # no memory, or cancelled: nothing of it stays
            self.close()
            raise

    def _load_all(self, on_bytes: Callable[[str, int, int], None] | None) -> None:
        for name in self.spec.parts:
            tell = partial(on_bytes, name) if on_bytes else None
            oom_fallback.again(
                self, name, partial(self._load, name, tell), when=f"{oom_fallback.called(name)} was loaded"
            )
        for name, folder in self.spec.tokenizers.items() if self.family.DRAWS else ():
            self.parts[name] = self.family.load_tokenizer(folder, name)
        if self.spec.processor is not None and request_checks.edits(self.spec, self.family):
            self.parts["processor"] = self.family.load_processor(self.spec.processor, self.spec.variant)

    def _is_own(self, name: str) -> bool:
        """Whether the part's weights are other than those of its file."""
        said = self.loading.get(name)
        return said is not None and not said.is_plain and not said.is_once

    def _load(self, name: str, tell: Callable[[int, int], None] | None) -> None:
        part = self.spec.parts[name]
        multiplies = self.fp8_products and name == apply.PART
        if multiplies:
            self.configs[name] = fp8_matmul.stored(self.configs.get(name, VramConfig()), part)
        if self._is_own(name) and self.configs.get(name, VramConfig()).managed and name not in self.packed:
            part_loading.place_packed(self, name, tell)
            part = self.spec.parts[name]
        if part_placement.is_placed(self, name):
            module = load.build_meta(part)
            check_finite.check(part, module)
            part_placement.place(self, name, module, tell)
        else:
            module = part_loading.load_part(self, name, tell)
            module.__dict__["vram_management_enabled"] = False
        try:
            if multiplies:
                fp8_matmul.prepare(self.placements[name])
            self.family.prepare(name, module)
        except BaseException:  # it may be loaded again
            if name in self.placements:
                self.placements.pop(name).close()
            raise
        self.parts[name] = self.adapters.modules[name] = module

    @contextmanager
    def using(self, *names: str) -> Iterator[None]:
        """Within it the parts `names` may be called; every other placed part is parked first."""
        for name in names:
            if name not in self.parts:
                folder = self.family.PARTS[name].folder if name in self.family.PARTS else name
                raise Trouble(
                    "missing_part",
                    f"This needs the part {name}, which was not loaded.",
                    hint=f"Add its files: the model's folder {folder}.",
                )
            part_loading.check_usable(self, name)
        for name, placement in self.placements.items():
            if name not in names:
                placement.offload()
        for name in names:
            if name in self.spec.parts and part_placement.is_placed(self, name) and name not in self.placements:
                part_placement.place(self, name, self.parts[name])
            if name in self.placements:
                self.placements[name].onload()
        tell = self.on_phase if names[0] in self.family.PARTS else None
        if tell:
            tell(self.family.PARTS[names[0]].phase)
        yield
        if tell:
            tell("")

    def settings(self, request: GenerationRequest) -> DrawSettings:
        """What the family's functions are told of `request` and this model."""
        found = settings_of(self.spec, width=request.width, height=request.height, guidance=request.guidance)
        return replace(found, scheduler={**found.scheduler, **self.schedule}) if self.schedule else found

    @torch.no_grad()
    def encode_prompt(self, prompt: str, edited: Sequence[Image.Image] = (), *, negative: bool = False) -> Encoding:
        """The encoding of `prompt`, with the pictures to edit, on the device; text encoders run only for what was not
        seen lately."""
        key = (prompt, negative, *map(request_checks.digest, edited))
        if key in self._encodings:
            self._encodings.move_to_end(key)
            return self._encodings[key]
        variant = self.spec.variant
        encoders = self.family.parts_of("text", variant, pictures=bool(edited))
        readers = (*self.family.TOKENIZERS, *(("processor",) if edited else ()))
        given = {"pictures": [tuple(edited)]} if edited else {}

        def work() -> Encoding:
            with self.using(*encoders, *readers):
                found = self.family.encode_text(
                    self.parts, [prompt], device=self.device, variant=variant, negative=negative, **given
                )[0]
                return {name: self._in_dtype(tensor).clone() for name, tensor in found.items()}

        main = self._largest(self.family.parts_of("text", variant))
        encoding = self._encodings[key] = oom_fallback.again(self, main, work, when="the prompt was encoded")
        while len(self._encodings) > KEPT_ENCODINGS:
            self._encodings.popitem(last=False)
        words = self.family.truncated(self.parts, prompt, encoding, tuple(edited))
        if words is not None:
            self.note(f"The prompt is too long: what comes after the first {words} tokens was not read.")
        return self._encodings[key]

    def _in_dtype(self, tensor: torch.Tensor) -> torch.Tensor:
        """In the computing dtype, unless it holds ids or a mask."""
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def _largest(self, names: Sequence[str]) -> str:
        """The part of `names` that memory runs out for."""
        return max(names, key=lambda name: self.spec.parts[name].nbytes if name in self.spec.parts else 0)

    def forget_prompts(self) -> None:
        """After LoRAs came or went: drops the encodings if a text encoder's weights were or are changed by one."""
        text = {name for name, part in self.family.PARTS.items() if part.phase == "text"}
        changed = any(text & set(one.hot) for one in self.adapters.loaded)
        if changed or self._text_changed:
            self._encodings.clear()
        self._text_changed = changed

    @torch.no_grad()
    def encode_picture(self, picture: Image.Image, width: int, height: int, generator=None) -> torch.Tensor:
        """Normalised latents (1, C, h, w) of a picture: the mean, or a sample by a CPU `generator`; in tiles where
        memory runs out without."""
        drawn = None if generator is None else generator.get_state()
        rows, columns = self.family.sizes(self.spec.variant).cells(width, height)

        def work() -> torch.Tensor:
            if generator is not None:
                generator.set_state(drawn)
            with self.using("vae"):
                pixels = image_tensors.to_pixels(picture, width, height).to(self.device, self.dtype)
                tiled = self.is_tiled("encode", rows * columns, None)
                found = self.family.encode_image(self.parts, pixels, generator=generator, tiled=bool(tiled))
                return each_stream(lambda one: one.to(self.dtype), found)

        return oom_fallback.again(
            self,
            "vae",
            work,
            when="the input picture was encoded",
            own=oom_fallback.tiling(self, "encode", rows, columns),
        )

    @torch.no_grad()
    def encode_references(self, edited: Sequence[Image.Image], settings: DrawSettings) -> tuple[torch.Tensor, ...]:
        """Normalised latents (C, h, w) of each picture to edit."""
        side = round(self.parts["processor"].reference_pixels ** 0.5)
        cells = side // self.family.sizes(self.spec.variant).compression

        def work() -> tuple[torch.Tensor, ...]:
            with self.using("vae", "processor"):
                tiled = bool(self.is_tiled("encode", cells * cells, None))
                found = self.family.encode_references(self.parts, edited, settings=settings, tiled=tiled)
                return tuple(one.to(self.dtype) for one in found)

        return oom_fallback.again(
            self,
            "vae",
            work,
            when="the pictures to edit were encoded",
            own=oom_fallback.tiling(self, "encode", cells, cells),
        )

    @torch.no_grad()
    def decode(self, latents: Latents, *, tiled: bool | tuple[int, int] | None = None) -> Image.Image:
        """The picture of latents (1, C, h, w); in tiles where asked, or where memory runs out without."""
        seen = self.family.preview_latents(latents)
        height, width = seen.shape[-2:]

        decoders = self.family.parts_of("decode", self.spec.variant)

        def work() -> Image.Image:
            with self.using(*decoders):
                given = each_stream(lambda one: one.to(self.dtype), latents)
                pixels = self.family.decode(self.parts, given, tiled=self.is_tiled("decode", height * width, tiled))
                picture = image_tensors.to_picture(pixels[0])
                self._preview.learn(seen, pixels)
                return picture

        return oom_fallback.again(
            self,
            "vae",
            work,
            when="the picture was decoded",
            own=oom_fallback.tiling(self, "decode", height, width, tiled),
        )

    def is_tiled(self, phase: str, cells: int, asked: bool | tuple[int, int] | None) -> bool | tuple[int, int]:
        """Whether, or how, a picture of so many cells goes through the autoencoder in tiles."""
        if not asked and cells >= self.lower.tiles.get(phase, cells + 1):
            return True
        return (self.tiled_vae and phase == "decode") if asked is None else asked

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
        edited: Sequence[Image.Image] | None = None,
        noise: torch.Tensor | None = None,
        tiled: bool | tuple[int, int] | None = None,
    ) -> Iterator[Image.Image]:
        """As `generate`, one picture after the other. `noise` (1, C, h, w) replaces that of the first picture's seed,
        `source` the request's input picture, `edited` its pictures to edit.

        Each picture is drawn by itself, so that picture 3 of 4 comes out the same when its seed is asked for alone.
        """
        try:
            for sentence in (*self.lower.news, *self.lower.standing()):
                self.note(sentence)
            yield from self._draw(request, on_step, should_stop, source, edited, noise, tiled)
        finally:
            self.lower.news.clear()

    def _draw(
        self, request: GenerationRequest, on_step, should_stop, source, edited, noise, tiled
    ) -> Iterator[Image.Image]:
        edited = request_checks.opened(request.edit_images) if edited is None else tuple(edited)
        denoise.check(self, request, len(edited))
        apply.arrange(self, request)
        if source is None and request.input_image:
            source = image_tensors.open_picture(request.input_image)
        settings = self.settings(request)
        positive, negative = self.encode_prompt(request.prompt, edited), None
        if any(branch.prompt == "negative" for branch in self.family.branches(settings)):
            negative = self.encode_prompt(request.negative_prompt, edited, negative=True)
        if edited:
            references = {"references": self.encode_references(edited, settings)}
            positive, negative = positive | references, negative and negative | references
        if on_step and self._preview.must_learn(settings):
            with self.using(*self.family.parts_of("decode", self.spec.variant)):
                self._preview.learn_from_noise(settings)
        for number in range(request.count):
            if should_stop and should_stop():
                raise Cancelled
            start = denoise.start(self, request, request.seed + number, source, noise if number == 0 else None)
            watch = on_step and watched(number, num_steps(start[1]), on_step, self._preview)
            latents = denoise.denoise(self, request, *start, positive, negative, watch, should_stop)
            yield self.decode(latents, tiled=tiled)

    def add_lora(self, part: str, source, *, strength: float = 1.0, hot: bool | None = None) -> LoraReceipt:
        """Adds a LoRA (a file or a state dict) to `part`, and its text encoder half to the text encoder if that is
        loaded."""
        part_loading.check_usable(self, part)
        if part in self.lower.moved:
            hot = None  # what could be fused into when it was loaded no longer can
        work = partial(self.adapters.add, source, strength=strength, hot=hot, part=part)
        receipt = oom_fallback.again(self, part, work, when="a LoRA was added")
        self.forget_prompts()
        return receipt

    def set_lora_strength(self, which: LoraReceipt | str, strength: float) -> LoraReceipt:
        """The same LoRA (its receipt, path or name) at another strength, without loading it again."""
        self.forget_prompts()
        work = partial(self.adapters.set_strength, which, strength)
        return oom_fallback.again(self, apply.PART, work, when="a LoRA's strength was changed")

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
        receipts = oom_fallback.again(self, apply.PART, partial(self.adapters.use, uses), when="LoRAs were added")
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
        device_memory.empty_cache(self.device)
