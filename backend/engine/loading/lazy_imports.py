"""Lazy imports: network modules of diffusers and transformers without what they import and nothing here uses.

Saves seconds and memory at start. Four things are kept out while such a module is imported, and are as usual
afterwards: the two packages of diffusers that import every network there is, torch's compiler (torch._dynamo, loaded on
first use), diffusers' hooks for peft (training here uses peft itself), and, in a process that is not one of several,
transformers' tensor parallelism (torch.distributed.tensor).

All of this rests on private parts of the three libraries (docs/private_api.md). `LOFT_LAZY_IMPORTS=0` in the environment
turns it off: everything is then imported as the libraries do, which is slower to start and gives the same pictures.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SWITCH = "LOFT_LAZY_IMPORTS"  # environment variable; "0" turns lazy imports off
_EAGER = ("diffusers.models.transformers", "diffusers.models.autoencoders")


def is_on() -> bool:
    """Whether imports are lazy: yes, unless the environment says LOFT_LAZY_IMPORTS=0."""
    return os.environ.get(SWITCH, "").strip().lower() not in ("0", "no", "off", "false")


def import_module(name: str) -> ModuleType:
    """`importlib.import_module`; for diffusers, transformers and peft without the expensive imports named above, unless
    they are turned off (`is_on`)."""
    if not is_on() or name in sys.modules or name.partition(".")[0] not in ("diffusers", "transformers", "peft"):
        return importlib.import_module(name)
    with _without_compiler(), _without_dtensor():
        if name.startswith("diffusers."):
            importlib.import_module("diffusers.models")
            for package in _EAGER:
                if package not in sys.modules:
                    _add_lazily(package)
            with _without_peft():
                return importlib.import_module(name)
        return importlib.import_module(name)


class _LazyPackage(ModuleType):
    """A package whose `__init__` runs when a name is first read that neither a submodule nor `_stand_ins` has."""

    _stand_ins: dict[str, object]  # while the libraries are imported
    _until_loaded: dict[str, object]  # until the package is loaded

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for answers in (self.__dict__.get("_stand_ins", {}), self.__dict__.get("_until_loaded", {})):
            if name in answers:
                return answers[name]
        _load(self)
        return getattr(self, name)


def _load(module: _LazyPackage) -> None:
    assert module.__spec__ is not None and module.__spec__.loader is not None
    # from here on an ordinary module (Python allows it for subclasses of ModuleType)
    module.__class__ = ModuleType  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("_stand_ins", "_until_loaded"):
        module.__dict__.pop(name, None)
    sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "package", None) is not module]
    module.__spec__.loader.exec_module(module)


class _PackageFirst(MetaPathFinder):
    """Loads a lazy `package` before any of its submodules: the compiler's import one another in circles. While the
    libraries are imported, the stand-ins suffice and nothing is loaded."""

    def __init__(self, package: _LazyPackage):
        self.package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith(f"{self.package.__name__}.") or "_stand_ins" in self.package.__dict__:
            return None
        _load(self.package)
        return importlib.util.spec_from_loader(name, _Known()) if name in sys.modules else None


class _Known(Loader):
    """Of a module that was imported meanwhile."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        pass


def _add_lazily(name: str) -> _LazyPackage:
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} is not installed"
    module = _LazyPackage(name)
    module.__spec__, module.__loader__, module.__package__ = spec, spec.loader, name
    module.__path__, module.__file__ = spec.submodule_search_locations or [], spec.origin
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    setattr(sys.modules[parent], leaf, module)
    return module


@contextmanager
def _without_compiler() -> Iterator[None]:
    # Both libraries import torchao and bitsandbytes where they are installed, and these need the compiler's insides.
    if any(importlib.util.find_spec(package) is not None for package in ("torchao", "bitsandbytes")):
        yield
        return
    if "torch._dynamo" not in sys.modules:
        sys.meta_path.insert(0, _PackageFirst(_add_lazily("torch._dynamo")))
    module = sys.modules["torch._dynamo"]
    if not isinstance(module, _LazyPackage):
        yield
        return
    # What diffusers' networks, optimizers and activation checkpointing read at every call; without meaning before
    # anything is compiled.
    module._until_loaded = {"is_compiling": _false, "graph_break": _false, "disable": _disable}
    # Decorators that matter to the compiler alone; the mark that `_marked_constant` sets is what it looks for.
    module._stand_ins = {
        "allow_in_graph": _identity,
        "assume_constant_result": _marked_constant,
        "disable": _disable,
    }
    try:
        yield
    finally:
        module.__dict__.pop("_stand_ins", None)


def _false() -> bool:
    return False


def _identity(function: Callable) -> Callable:
    return function


def _marked_constant(function: Any) -> Callable:
    function._dynamo_marked_constant = True
    return function


def _disable(function: Callable | None = None, recursive: bool = True, **_: object) -> Callable:
    return _identity if function is None else function


@contextmanager
def _without_dtensor() -> Iterator[None]:
    """transformers imports torch.distributed.tensor (tensor parallelism) where available, and with it all of sympy."""
    if "WORLD_SIZE" in os.environ:
        yield
        return
    import torch

    if "torch.distributed.tensor" not in sys.modules:  # peft expects it to be imported already
        sys.meta_path.insert(0, _PackageFirst(_add_lazily("torch.distributed.tensor")))
    available, torch.distributed.is_available = torch.distributed.is_available, _false
    try:
        yield
    finally:
        torch.distributed.is_available = available


@contextmanager
def _without_peft() -> Iterator[None]:
    from diffusers.utils import import_utils

    had, import_utils._peft_available = import_utils._peft_available, False
    try:
        yield
    finally:
        import_utils._peft_available = had
