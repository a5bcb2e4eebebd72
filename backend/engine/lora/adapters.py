"""LoRA adapters on loaded parts: loaded in any format, checked before anything changes, fused or as side branches.

    adapters = Adapters({"dit": module}, family=family, specs={"dit": part_spec})
    receipt = adapters.add("style.safetensors", strength=0.8, hot=True)
    adapters.set_strength(receipt, 0.5); adapters.remove(receipt); adapters.clear()

For a module on its own, `load(module, file)` keeps such an object for it. Every application answers with a receipt that
names what was matched and what was not, and why; nothing matched is an error and changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from backend.catalog.family import Family
from backend.catalog.spec import PartSpec
from backend.engine.loading.tensor_source import open_source
from backend.engine.lora import fuse, side_branch
from backend.engine.lora.algorithms.delta import Change, Dense
from backend.engine.lora.loaded import (
    FileOrTensors,
    Loaded,
    check_strength,
    digest_of,
    family_of,
    find,
    is_multiplicative,
    modules_of,
    of_part,
    receipt_of,
)
from backend.engine.lora.read import read_lora
from backend.engine.offload import placement
from backend.engine.quantization.layers import full_weight, holds_quantized, is_quantized
from backend.schema.messages import Trouble
from backend.schema.request import LoraReceipt, LoraUse

OWN = "_own_adapters"


class Adapters:
    """What acts on a set of parts (`modules`: part name -> module), in the order in which it was added.

    `specs` tell where the parts' weights are stored, so that they can be read again; a part without one keeps a copy of
    what is fused into. `family` gives the spellings of module names; None: found by the modules' classes among
    `families`.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        *,
        family: Family | None = None,
        specs: Mapping[str, PartSpec] | None = None,
        families: Iterable[Family] | None = None,
    ):
        if families is None:
            from backend.families import FAMILIES as families
        self.modules, self.specs, self.families = dict(modules), dict(specs or {}), tuple(families)
        self.family = family or family_of(self.modules, self.families)
        self.loaded: list[Loaded] = []
        self._kept: dict[tuple[str, str], torch.Tensor] = {}
        self._changed: set[tuple[str, str]] = set()  # (part, parameter) that something has been fused into
        self._pending: dict[str, set[str]] | None = None  # part -> weights to be settled together, while `use` works
        self._prefers_hot: set[str] = set()

    @property
    def receipts(self) -> tuple[LoraReceipt, ...]:
        """Of everything that acts now."""
        return tuple(one.receipt for one in self.loaded)

    def prefer_hot(self, part: str | None = None) -> None:
        """From now on a LoRA becomes a side branch (hot) by default, on every part, or on one."""
        self._prefers_hot |= {part} if part else set(self.modules)

    def add(
        self,
        source: FileOrTensors,
        *,
        strength: float = 1.0,
        hot: bool | None = None,
        part: str | None = None,
        name: str = "",
    ) -> LoraReceipt:
        """Adds a LoRA. `part`: where names without a prefix belong, and the one part it may touch beside the text
        encoders; None: any.

        `hot` None: beside the weights where they are placed or quantized or `prefer_hot` was called, else into them.
        Raises Trouble, with nothing changed, for a damaged or incomplete file, one for another model, an algorithm that
        is not read, or no match at all.
        """
        check_strength(strength)
        opened = open_source(source, name)
        found = read_lora(opened, self.modules, self.family, self.families, weight_of=self._base_of, first=part)
        modes = {part: self._is_hot(part, hot) for part in found.changes}
        receipt = receipt_of(opened, found, strength=strength, hot=any(modes.values()))
        names = {part: tuple(change.name for change in changes) for part, changes in found.changes.items()}
        cold = not all(modes.values())
        one = Loaded(opened.path or {}, receipt, names, found.changes, modes, order=digest_of(opened) if cold else "")
        self._keep_originals(one)
        self.loaded.append(one)
        try:
            for part, changes in found.changes.items():
                if modes[part]:
                    self._refresh_hot(part, {change.module for change in changes})
                else:
                    self._fuse_weights(part, set(names[part]))
        except BaseException:  # out of memory, a disk that failed: as if it had never been asked for
            self.remove(receipt)
            raise
        self._drop_changes()
        return receipt

    def check(self, source: FileOrTensors, *, part: str | None = None) -> None:
        """Raises Trouble for what `add` would refuse; nothing is changed, and the modules may be without weights (on
        the meta device)."""
        read_lora(open_source(source), self.modules, self.family, self.families, weight_of=self._base_of, first=part)

    def set_strength(self, which: LoraReceipt | str, strength: float) -> LoraReceipt:
        """The same LoRA at another strength; its file is not read again if it is hot. Answers the new receipt."""
        check_strength(strength)
        one = find(self.loaded, which)
        if one.receipt.strength == strength:
            return one.receipt
        before, one.receipt = one.receipt, replace(one.receipt, strength=strength)
        try:
            for part, hot in one.hot.items():
                if hot:
                    self._refresh_hot(part, modules_of(one.names[part]))
                else:
                    self._fuse_weights(part, set(one.names[part]))
        except BaseException:  # out of memory: not yet at that strength, and to be asked for again
            one.receipt = before
            raise
        self._drop_changes()
        return one.receipt

    def remove(self, which: LoraReceipt | str) -> None:
        """Takes one LoRA off; the others stay as they are."""
        one = find(self.loaded, which)
        others = [other for other in self.loaded if other is not one]
        if self._pending is None:
            for part in (part for part, hot in one.hot.items() if not hot):
                self._read_again(
                    part, set(one.names[part]), others
                )  # what cannot be read is said before anything changes
        self.loaded = others
        for part, hot in one.hot.items():
            if hot:
                self._refresh_hot(part, modules_of(one.names[part]))
            else:
                self._fuse_weights(part, set(one.names[part]))
        self._drop_changes()

    def clear(self, part: str | None = None) -> None:
        """Takes everything off (of one part, or of all): every weight is the file's again, bit for bit."""
        for name in [part] if part else list(self.modules):
            touched = {key for one in self.loaded if not one.hot.get(name, True) for key in one.names[name]}
            hot = {module for one in self.loaded if one.hot.get(name) for module in modules_of(one.names[name])}
            for one in self.loaded:
                one.hot.pop(name, None)
                one.names.pop(name, None)
                if one.changes is not None:
                    one.changes.pop(name, None)
            self.loaded = [one for one in self.loaded if one.hot]
            for key in touched:
                self._restore(name, key)
            self._refresh_hot(name, hot)

    def unfuse_part(self, part: str) -> None:
        """After the weights of `part` were reloaded: every LoRA of it, fused ones too, becomes a side branch. Can be
        repeated."""
        self._changed = {(owner, name) for owner, name in self._changed if owner != part}
        for one in self.loaded:
            if not one.hot.get(part, True):
                one.changes = self._reread_changes(one)
                one.hot[part], one.receipt = True, replace(one.receipt, mode="hot")
        self._refresh_hot(
            part, {module for one in self.loaded if part in one.hot for module in modules_of(one.names[part])}
        )

    def close(self) -> None:
        """Drops the references to the parts; their weights stay as they are."""
        self.modules.clear()
        self.loaded.clear()
        self._kept.clear()
        self._changed.clear()

    def use(self, wanted: Sequence[LoraUse], *, hot: bool | None = None) -> tuple[LoraReceipt, ...]:
        """Makes exactly these LoRAs act, each at its strength, with as little work as that takes. Nothing changes if
        one is not readable."""
        wanted = [one for one in wanted if one.strength != 0.0]
        paths = [os.fspath(one.path) for one in wanted]
        if len(set(paths)) != len(paths):
            raise Trouble(
                "bad_value", f"{max(paths, key=paths.count)} is asked for twice.", hint="Ask for it once, at the sum."
            )
        before = {one.receipt.path: one for one in self.loaded}
        with self._fused_together():
            self._use(wanted, paths, before, hot)
        order = {path: place for place, path in enumerate(paths)}
        return tuple(sorted(self.receipts, key=lambda receipt: order.get(receipt.path, len(order))))

    def _use(self, wanted: list[LoraUse], paths: list[str], before: Mapping[str, Loaded], hot: bool | None) -> None:
        added: list[LoraReceipt] = []
        try:
            for one in wanted:
                if os.fspath(one.path) not in before:
                    added.append(self.add(one.path, strength=one.strength, hot=hot))
        except Trouble:
            for receipt in added:
                self.remove(receipt)
            raise
        for path, one in before.items():
            if path not in paths:
                self.remove(one.receipt)
        for one in wanted:
            if os.fspath(one.path) in before:
                self.set_strength(before[os.fspath(one.path)].receipt, one.strength)

    @contextmanager
    def _fused_together(self) -> Iterator[None]:
        """Within it, fusing is deferred; at the end each weight is fused once, with all LoRAs that are loaded then."""
        self._pending = {}
        try:
            yield
        finally:
            waiting, self._pending = self._pending, None
            try:
                for part, names in waiting.items():
                    self._fuse_weights(part, names)
            except BaseException:  # out of memory, a file that vanished: the LoRAs of these weights are removed
                for part, names in waiting.items():
                    self._drop_on(part, names)
                raise
            self._drop_changes()

    def _is_hot(self, part: str, asked: bool | None) -> bool:
        placed = placement.of(self.modules[part])
        quantized = holds_quantized(self.modules[part])
        fixed = quantized or (placed is not None and not placed.weights_writable)
        if asked is False and fixed:
            why = "quantized" if quantized else "moved or stored in 8 bits"
            raise Trouble(
                "bad_value",
                f"The weights of {part} are {why}, so a LoRA cannot be fused into them.",
                hint="Leave hotload out, or set it to True.",
            )
        if asked is not None:
            return asked
        return quantized or part in self._prefers_hot or placed is not None

    def _base_of(self, part: str, name: str) -> torch.Tensor:
        """The unchanged values of a parameter, whatever has been fused into it and wherever it lies; on the CPU."""
        module, spec = self.modules[part], self.specs.get(part)
        weight = fuse.parameter(module, name)
        if (part, name) in self._changed:
            return fuse.original(name, spec, of_part(self._kept, part), weight)
        placed = placement.of(module)
        if placed is not None and not placed.weights_writable:
            return placed.read(name).cpu()
        layer = module.get_submodule(name.rpartition(".")[0])
        if name.endswith(".weight") and is_quantized(layer):
            return full_weight(layer).cpu()
        return weight.detach().cpu()

    def _keep_originals(self, one: Loaded) -> None:
        """Where no file tells what a weight was, a copy of it is kept while something is fused into it."""
        for part, hot in one.hot.items():
            spec = self.specs.get(part)
            for name in () if hot else one.names[part]:
                if (spec is None or name not in spec.tensors) and (part, name) not in self._kept:
                    self._kept[part, name] = fuse.parameter(self.modules[part], name).detach().cpu().clone()

    def _reread_changes(self, one: Loaded) -> dict[str, list[Change]]:
        """The changes of a LoRA, read again if they were dropped. Raises Trouble if the file is not what it was."""
        if one.changes is not None:
            return one.changes
        opened = open_source(one.source, one.receipt.name)
        if opened.hash != one.receipt.hash:
            raise Trouble(
                "damaged", f"{opened.name} has changed since it was loaded.", hint="Clear the LoRAs and load it anew."
            )
        found = read_lora(opened, self.modules, self.family, self.families, weight_of=self._base_of)
        return found.changes

    def _fused_on(self, part: str, names: set[str], loaded: Sequence[Loaded]) -> list[Loaded]:
        """Those of `loaded` that are fused into some of the weights `names`, always in the same order."""
        found = [one for one in loaded if not one.hot.get(part, True) and names & set(one.names[part])]
        return sorted(found, key=lambda one: (one.order, one.receipt.strength))

    def _read_again(self, part: str, names: set[str], loaded: Sequence[Loaded]) -> None:
        for one in self._fused_on(part, names, loaded):
            one.changes = self._reread_changes(one)

    def _fuse_weights(self, part: str, names: set[str]) -> None:
        """Makes weights `names` what their file has and everything that is fused into them, rounded once."""
        if self._pending is not None:
            self._pending.setdefault(part, set()).update(names)
            return
        fused = self._fused_on(part, names, self.loaded)
        self._read_again(part, names, self.loaded)
        uses: dict[str, list[tuple[Change, float]]] = {name: [] for name in names}
        for one in fused:
            for change in one.changes_of(part):
                if change.name in uses:
                    uses[change.name].append((change, one.receipt.strength))
        for name, here in uses.items():
            self._fuse(part, name, here)
        self._refresh_hot(part, self._multiplied(part) & modules_of(names))

    def _fuse(self, part: str, name: str, uses: list[tuple[Change, float]]) -> None:
        weight = fuse.parameter(self.modules[part], name)
        if (part, name) in self._changed:
            self._restore(part, name)
        if not uses:
            self._kept.pop((part, name), None)
            return
        self._changed.add((part, name))
        if len(uses) > 1:
            fuse.fuse_all(weight, uses, weight.detach())
        else:
            change, strength = uses[0]
            fuse.fuse(weight, change, strength, weight.detach().clone() if change.dora else None)

    def _drop_changes(self) -> None:
        """Frees changes that are in no side branch and can be read again from their file."""
        for one in self.loaded if self._pending is None else ():
            if isinstance(one.source, Path) and not any(one.hot.values()):
                one.changes = None

    def _drop_on(self, part: str, names: set[str]) -> None:
        """Weights `names` as their file has them, and no LoRA any more that was to act on them."""
        gone = self._fused_on(part, names, self.loaded)
        self.loaded = [one for one in self.loaded if one not in gone]
        for one in gone:
            for other, touched in one.names.items():
                if one.hot[other]:
                    self._refresh_hot(other, modules_of(touched))
                else:
                    for name in touched:
                        self._restore(other, name)

    def _multiplied(self, part: str) -> set[str]:
        """Modules with a side branch that multiplies the weight (DoRA, OFT)."""
        return {
            change.module
            for one in self.loaded
            if one.hot.get(part)
            for change in one.changes_of(part)
            if is_multiplicative(change)
        }

    def _restore(self, part: str, name: str) -> None:
        """The weight as its file has it."""
        weight = fuse.parameter(self.modules[part], name)
        fuse.restore(weight, fuse.original(name, self.specs.get(part), of_part(self._kept, part), weight))
        self._changed.discard((part, name))
        if not any(not one.hot.get(part, True) and name in one.names[part] for one in self.loaded):
            self._kept.pop((part, name), None)

    def _refresh_hot(self, part: str, modules: Iterable[str]) -> None:
        """Rebuilds the side branches of `modules` from the loaded LoRAs."""
        uses: dict[str, list[tuple[Change, float]]] = {name: [] for name in modules}
        fused = {name for one in self.loaded if not one.hot.get(part, True) for name in one.names[part]}
        for one in self.loaded:
            if one.hot.get(part):
                for change in one.changes_of(part):
                    if change.module in uses:
                        uses[change.module].append((self._of_base(part, change, fused), one.receipt.strength))
        for name, here in uses.items():
            side_branch.attach(self.modules[part].get_submodule(name), here)

    def _of_base(self, part: str, change: Change, fused: set[str]) -> Change:
        """A change that multiplies the weight, as what it adds to the model's own where others are fused into the
        layer's."""
        if change.name not in fused or not is_multiplicative(change):
            return change
        base = self._base_of(part, change.name).float() if change.dora else None
        return Change(change.module, change.parameter, Dense(change.dense(base), 1.0))


def of(module: nn.Module) -> Adapters:
    """The adapters of a module that stands alone; they live as long as it does."""
    if OWN not in module.__dict__:
        part = "text_encoder" if hasattr(module, "get_input_embeddings") else "dit"
        module.__dict__[OWN] = Adapters({part: module})
    return module.__dict__[OWN]


def load(module: nn.Module, source: FileOrTensors, *, strength: float = 1.0, hot: bool | None = None) -> LoraReceipt:
    """Adds a LoRA to any module by itself (a diffusers transformer or UNet); `of(module)` takes it off or changes
    it."""
    return of(module).add(source, strength=strength, hot=hot)


def clear(module: nn.Module) -> None:
    """Takes off what `load` added."""
    of(module).clear()
