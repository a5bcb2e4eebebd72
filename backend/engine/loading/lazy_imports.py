"""Imports the modules of networks without what they drag in and nobody here uses: less time, less memory.

Four things are kept out while such a module is imported, and are as usual afterwards: the two packages of diffusers that import
every network there is, torch's compiler (loaded on first use), diffusers' hooks for peft (training here uses peft itself), and, in a
process that is not one of several, transformers' ways to spread tensors.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType

_EAGER = ("diffusers.models.transformers", "diffusers.models.autoencoders")


def import_module(name: str) -> ModuleType:
    """`importlib.import_module`, lightly for diffusers, transformers and peft."""
    if name in sys.modules or name.partition(".")[0] not in ("diffusers", "transformers", "peft"):
        return importlib.import_module(name)
    with _without_compiler(), _without_spread_tensors():
        if name.startswith("diffusers."):
            importlib.import_module("diffusers.models")
            for package in _EAGER:
                if package not in sys.modules:
                    _add_lazily(package)
            with _without_peft():
                return importlib.import_module(name)
        return importlib.import_module(name)


class _Lazy(ModuleType):
    """A package whose `__init__` runs when a name is asked for that neither a submodule nor `_stand_ins` has given."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        for answers in (self.__dict__.get("_stand_ins", {}), self.__dict__.get("_until_loaded", {})):
            if name in answers:
                return answers[name]
        _load(self)
        return getattr(self, name)


def _load(module: _Lazy) -> None:
    module.__class__ = ModuleType
    for name in ("_stand_ins", "_until_loaded"):
        module.__dict__.pop(name, None)
    sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "package", None) is not module]
    module.__spec__.loader.exec_module(module)


class _PackageFirst(MetaPathFinder):
    """A submodule of a lazy `package` is not imported before the package is: the compiler's import one another in circles. What the
    libraries want of it while they are imported lightly stands by itself."""

    def __init__(self, package: _Lazy):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if not name.startswith(f"{self.package.__name__}.") or "_stand_ins" in self.package.__dict__:
            return None
        _load(self.package)
        return importlib.util.spec_from_loader(name, _Known()) if name in sys.modules else None


class _Known(Loader):
    """Of a module that was imported meanwhile."""

    def create_module(self, spec):
        return sys.modules[spec.name]

    def exec_module(self, module) -> None:
        pass


def _add_lazily(name: str) -> ModuleType:
    spec = importlib.util.find_spec(name)
    module = _Lazy(name)
    module.__spec__, module.__loader__, module.__package__ = spec, spec.loader, name
    module.__path__, module.__file__ = spec.submodule_search_locations, spec.origin
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    setattr(sys.modules[parent], leaf, module)
    return module


@contextmanager
def _without_compiler() -> Iterator[None]:
    # Both libraries ask torch._dynamo for decorators that matter to the compiler alone; the marks below are what it looks for.
    # Both import these where they are installed, and these want the compiler's insides.
    if any(importlib.util.find_spec(package) is not None for package in ("torchao", "bitsandbytes")):
        yield
        return
    if "torch._dynamo" not in sys.modules:
        sys.meta_path.insert(0, _PackageFirst(_add_lazily("torch._dynamo")))
    module = sys.modules["torch._dynamo"]
    if not isinstance(module, _Lazy):
        yield
        return
    # What networks of diffusers, optimizers and checkpointing ask at every call; none of it means anything before something is compiled.
    module._until_loaded = {"is_compiling": _no, "graph_break": _no, "disable": _disable}
    module._stand_ins = {
        "allow_in_graph": _as_it_is,
        "assume_constant_result": _marked_constant,
        "disable": _disable,
    }
    try:
        yield
    finally:
        module.__dict__.pop("_stand_ins", None)


def _no() -> bool:
    return False


def _as_it_is(function):
    return function


def _marked_constant(function):
    function._dynamo_marked_constant = True
    return function


def _disable(function=None, recursive=True, **_):
    return _as_it_is if function is None else function


@contextmanager
def _without_spread_tensors() -> Iterator[None]:
    """transformers asks whether torch can spread tensors over processes and then imports that, and with it a whole computer algebra."""
    if "WORLD_SIZE" in os.environ:
        yield
        return
    import torch

    if "torch.distributed.tensor" not in sys.modules:  # peft takes it for granted that somebody has imported it
        sys.meta_path.insert(0, _PackageFirst(_add_lazily("torch.distributed.tensor")))
    told, torch.distributed.is_available = torch.distributed.is_available, _no
    try:
        yield
    finally:
        torch.distributed.is_available = told


@contextmanager
def _without_peft() -> Iterator[None]:
    from diffusers.utils import import_utils

    had, import_utils._peft_available = import_utils._peft_available, False
    try:
        yield
    finally:
        import_utils._peft_available = had
