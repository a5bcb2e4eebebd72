"""The data loader: training batches from cached latents and prompt embeddings. What a sample is follows from the seed
and its place alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from random import Random

import torch

from backend.dataset.bucket_sampler import Batch
from backend.dataset.captions import drawn
from backend.dataset.crops import cut
from backend.dataset.dataset import Item
from backend.dataset.reference_images import Shown
from backend.schema.messages import Trouble
from backend.schema.training.config import TrainingConfig
from backend.training.encoding.encoding_cache import EncodingCache, View, read_mask
from backend.training.encoding.open_images import open_reference
from backend.training.model.flow_matching_loss import Draws, NoiseLevels, draw, seed_of
from backend.training.model.training_module import TrainingBatch


@dataclass(frozen=True)
class Sample:
    """What a sample is drawn from: a prompt, the keys of the pictures that it is edited from, its size (height,
    width)."""

    prompt: str
    references: tuple[str, ...]
    size: tuple[int, int]


@dataclass
class Source:
    """The data loader: items, their sizes (height, width), and the keys of their cached latents and prompt
    embeddings."""

    items: list[Item]
    sizes: list[tuple[int, int]]
    latents: dict[View, str]  # view -> key
    texts: (
        dict[str, str] | None
    )  # `prompt_name` -> key; None: the text encoder trains, or captions are not known beforehand
    latent_store: EncodingCache
    text_store: EncodingCache
    config: TrainingConfig
    levels: NoiseLevels
    references: dict[View, tuple[str, ...]] = field(default_factory=dict)  # view -> keys of what it is edited from
    reference_sizes: list[tuple[tuple[int, int], ...]] = field(default_factory=list)  # of each item (height, width)
    shown: dict[str, Shown] = field(default_factory=dict)  # key of a reference -> the picture it was made of
    samples: list[Sample] = field(default_factory=list)
    trained: tuple[str, ...] = ()  # the parts whose weights or adapters train
    processor: str = ""  # a hash of how pictures are prepared for the text encoder

    @property
    def shapes(self) -> list[tuple]:
        """What has to be the same in a batch: an item's size, and the sizes of what it is edited from."""
        return [self.shape(number) for number in range(len(self.items))]

    def shape(self, number: int) -> tuple[tuple[int, int], ...]:
        return (self.sizes[number], *self.reference_sizes[number])

    def pixels(self, number: int) -> int:
        """Of all pictures that the network is given for an item."""
        return sum(height * width for height, width in self.shape(number))

    def refer(self, view: View, some: Iterable[Shown], key: Callable[[Shown], str]) -> dict[str, Shown]:
        """Notes that `view` is edited from `some`, and returns them by their keys."""
        named = [(key(one), one) for one in some]
        self.references[view] = tuple(name for name, _ in named)
        self.shown |= named
        return dict(named)

    def with_references(self, encoding: dict, keys: tuple[str, ...]) -> dict:
        return {**encoding, "references": self.latents_of(keys)} if keys else encoding

    def latents_of(self, keys: Iterable[str]) -> tuple[torch.Tensor, ...]:
        return tuple(self._latents(key) for key in keys)

    def pictures_of(self, keys: Iterable[str]) -> tuple:
        return tuple(open_reference(self.shown[key]) for key in keys)

    def load_batch(self, batch: Batch, *, scale: float) -> TrainingBatch:
        """The training batch (tensors on the CPU, latents (B, C, h, w) float32) of the items in `batch`.

        `scale`: the loss weight of a sample of weight 1.
        """
        config, seed = self.config, self.config.training.seed
        prompts, latents, masks, references = [], [], [], []
        for number, place in zip(batch.items, batch.places, strict=True):
            random = Random(seed_of(seed, place, "sample"))
            item = self.items[number]
            flip = config.dataset.flip and not item.prior and random.random() < 0.5
            prompts.append(self._caption(item, random))
            view = self._view(number, flip, random)
            latents.append(self._latents(self.latents[view]))
            references.append(self.references.get(view, ()))
            if config.dataset.masked_loss != "none":
                masks.append(self._mask(view, latents[-1]))
        size = self.sizes[batch.items[0]]
        draws, levels = None, None
        if config.training.task.startswith("direct_distill"):
            steps = self.items[batch.items[0]].steps or config.loss.distill_steps
            draws, levels = self._start(batch, latents[0].shape), self._steps(size, steps)
        return TrainingBatch(
            latents=torch.stack(latents),
            prompts=tuple(prompts),
            encodings=None
            if self.texts is None
            else [self.text(*told) for told in zip(prompts, references, strict=True)],
            references=[self.latents_of(keys) for keys in references] if any(references) else None,
            pictures=[self.pictures_of(keys) for keys in references]
            if self.texts is None and any(references)
            else None,
            draws=draws
            or draw(
                latents[0].shape,
                batch.places,
                config.loss,
                seed=seed,
                schedule=self._schedule_levels(size),
                table=self.levels.table(size),
                within=self._within(),
            ),
            weights=torch.tensor([scale * self._sample_weight(number) for number in batch.items]),
            mask=torch.stack(masks) if masks else None,
            levels=levels,
            settings=self.levels.settings(size),
        )

    def _schedule_levels(self, size: tuple[int, int]) -> torch.Tensor | None:
        """The noise levels that are drawn evenly, where a schedule says them."""
        match self.config.loss.timestep_sampling:
            case "scheduler":
                return self.levels.practised(size)
            case "shifted":
                return self.levels.drawn(size)[:-1]
        return None

    def _within(self) -> tuple[float, float]:
        """The noise levels of the part that trains, of a model with experts for ranges of them."""
        family, variant = self.levels.family, self.levels.spec.variant
        part = next((name for name in family.parts_of("denoise", variant) if name in self.trained), "dit")
        return family.sigma_range(part, variant)

    def _steps(self, size: tuple[int, int], steps: int) -> torch.Tensor:
        """(steps + 1,): the noise levels between which a student draws."""
        if self.config.loss.timestep_sampling == "scheduler":
            return torch.cat([self.levels.practised(size, steps), torch.zeros(1)])
        return self.levels.drawn(size, steps)

    def _start(self, batch: Batch, shape) -> Draws:
        """Where a student begins: the very noise from which its teacher drew the picture, if the dataset tells its
        seed."""
        noise = []
        for number, place in zip(batch.items, batch.places, strict=True):
            seed = self.items[number].seed
            generator = torch.Generator().manual_seed(
                seed_of(self.config.training.seed, place) if seed is None else seed
            )
            noise.append(torch.randn((1, *shape), generator=generator)[0])
        return Draws(noise=torch.stack(noise), sigma=torch.ones(len(noise)))

    def _caption(self, item: Item, random: Random) -> str:
        section = self.config.dataset
        return drawn(item.captions, random, dropout=section.caption_dropout, shuffle=section.caption_shuffle)

    def _sample_weight(self, number: int) -> float:
        return self.config.prior.prior_weight if self.items[number].prior else 1.0

    def _view(self, number: int, flip: bool, random: Random) -> View:
        """Which cut of a picture is shown; it is drawn last, so that runs without cuts draw what they always drew."""
        cuts = next(place for place in count(1) if View(number, flip, place) not in self.latents)
        return View(number, flip, random.randrange(cuts) if cuts > 1 else 0)

    def _mask(self, view: View, latents: torch.Tensor) -> torch.Tensor:
        section, item, size = self.config.dataset, self.items[view.item], self.sizes[view.item]
        box = cut(item, size, view.cut, zoom=section.crop_zoom)
        cells = (latents.shape[-2], latents.shape[-1])
        mask = read_mask(item, size, cells, kind=section.masked_loss, flip=view.flip, box=box)
        return section.mask_floor + (1 - section.mask_floor) * mask

    def _latents(self, key: str) -> torch.Tensor:
        found = self.latent_store.get(key)
        if found is None:
            raise Trouble("cache_lost", "An encoding was deleted from the cache while training.", hint="Start again.")
        return found["latents"]

    def text(self, prompt: str, references: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
        assert self.texts is not None
        found = self.text_store.get(self.texts[prompt_name(prompt, references)])
        if found is None:
            raise Trouble("cache_lost", "An encoding was deleted from the cache while training.", hint="Start again.")
        return found


def prompt_name(prompt: str, references: tuple[str, ...]) -> str:
    """A name for a prompt with the pictures that go with it; without pictures it is the prompt."""
    return "\x1f".join((prompt, *references))
