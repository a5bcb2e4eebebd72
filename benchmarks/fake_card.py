"""A CUDA device without a card: what lies on it has sizes and no numbers, what lies in RAM is real, and every byte on
it is counted.

The code that runs on it is the very code that runs on a card: its devices are called `cuda`, its copies are made on
streams, its backward passes by torch's autograd. torch's fake tensors are the sizes; for their backward passes torch
wants a device that a build without CUDA has not, and gets one from a page of C++ whose streams and events do nothing
(compiled when asked for, some seconds). Attention and `rms_norm` are put in the shapes of CUDA's kernels
(`backend.engine.tracing.allocation_recorder`). Nothing overlaps: what two streams would hold at the same time is held
one after the other.

`appear` comes before the first import of torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

CARD_BYTES = 80 << 30  # of the card that is told of
SOURCE = r"""
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;

namespace {
const Device kCard(DeviceType::CUDA, 0);
Stream one() { return Stream(Stream::DEFAULT, kCard); }

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return kCard; }
  Device getDevice() const override { return kCard; }
  Stream getStream(Device) const noexcept override { return one(); }
  Stream getDefaultStream(Device) const override { return one(); }
  Stream getNewStream(Device, int) const override { return one(); }
  Stream exchangeStream(Stream) const noexcept override { return one(); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  bool isPinnedPtr(const void*) const override { return true; }
};
using at::CUDAHooksRegistry, at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace
"""


def build(folder: Path) -> Path:
    """The device as a library for the torch that is installed."""
    home, compiler = (
        Path(importlib.util.find_spec("torch").origin).parent,
        shutil.which("g++") or shutil.which("clang++"),
    )
    if compiler is None or sys.platform != "linux":
        raise SystemExit(
            "A card without a card needs Linux, a C++ compiler (g++ or clang++) and torch's build for CPUs."
        )
    (folder / "card.cpp").write_text(SOURCE, encoding="utf-8")
    libraries = [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu"]
    flags = [
        "-std=c++20",
        "-O0",
        "-shared",
        "-fPIC",
        f"-I{home / 'include'}",
        str(folder / "card.cpp"),
        "-o",
        str(folder / "card.so"),
    ]
    subprocess.run([compiler, *flags, *libraries], check=True)
    return folder / "card.so"


def appear(library: Path | None = None) -> None:
    """Makes the device known. `library`: what `build` made before."""
    assert "torch" not in sys.modules, "the device has to be there before torch is"
    home = Path(importlib.util.find_spec("torch").origin).parent / "lib"
    with tempfile.TemporaryDirectory() as folder:
        library = library or build(Path(folder))
        for name in ("libc10.so", "libtorch_cpu.so"):
            ctypes.CDLL(str(home / name), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library))
    import torch

    if torch.version.cuda:
        raise SystemExit("This torch is built for CUDA: measure on the card, or use the build for CPUs.")


class Bytes:
    """Bytes on the card: `now`, and the `highest` there were."""

    def __init__(self):
        self.now = self.highest = 0
        self._known: dict[int, tuple[weakref.ref, int]] = {}

    def made(self, storage) -> None:
        from backend.engine.tracing.allocation_recorder import rounded

        key = storage._cdata
        if key not in self._known:
            nbytes = rounded(storage.nbytes())
            self._known[key] = weakref.ref(storage, lambda _: self._dropped(key)), nbytes
            self.now += nbytes
            self.highest = max(self.highest, self.now)

    def _dropped(self, key: int) -> None:
        self.now -= self._known.pop(key)[1]


@contextlib.contextmanager
def card() -> Iterator[Bytes]:
    """While this is open, torch has one CUDA device; what is made on it is counted."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map_only

    from backend.engine.tracing import allocation_recorder

    counted, sizes = Bytes(), FakeTensorMode(allow_non_fake_inputs=True)
    scalar = torch.ops.aten._local_scalar_dense.default

    class Device(TorchDispatchMode):
        """Runs what concerns the card on sizes, and everything else as it is."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
            there = any(isinstance(one, FakeTensor) for one in tree_leaves((args, kwargs)))
            if not there and getattr(kwargs.get("device"), "type", "") != "cuda":
                return func(*args, **kwargs)
            if func is scalar:
                return (
                    False if args[0].dtype == torch.bool else 1.0
                )  # a number that nobody knows: finite, and no NaN among codes
            given, named = tree_map_only(torch.Tensor, sized, (args, kwargs))
            with sizes:
                found = func(*given, **named)
            if func._schema.is_mutable and isinstance(args[0], torch.Tensor) and not isinstance(args[0], FakeTensor):
                return args[0]  # in RAM, which keeps its numbers
            return tree_map_only(FakeTensor, keep, found)

    def sized(tensor):
        return tensor if isinstance(tensor, FakeTensor) else sizes.from_tensor(tensor)

    def keep(tensor):
        if tensor.device.type == "cpu":
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        counted.made(tensor.untyped_storage())
        return tensor

    with _runtime(torch, counted, FakeTensor), allocation_recorder._as_on_cuda(allocation_recorder.Tape()), Device():
        yield counted


class _Still:
    """A stream or an event: what is put on it is done already."""

    def __init__(self, *arguments, **named):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def record_event(self, *arguments):
        return self

    def wait_stream(self, *arguments) -> None:
        pass

    wait_event = record = synchronize = wait_stream

    def query(self) -> bool:
        return True


@contextlib.contextmanager
def _runtime(torch, counted: Bytes, fake: type) -> Iterator[None]:
    """torch.cuda as it is on a card, as far as it is asked for here."""
    still, plain = _Still(), torch.UntypedStorage.data_ptr
    kinds = importlib.import_module(
        "torch.optim.optimizer"
    )._foreach_supported_types  # CUDA's optimizers step on all weights at once
    facts = SimpleNamespace(name="a card", total_memory=CARD_BYTES, major=9, minor=0, multi_processor_count=132)
    changes = {
        torch.cuda: {
            "Stream": _Still,
            "Event": _Still,
            "stream": lambda stream: still,
            "current_stream": lambda *_: still,
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda *_: None,
            "_lazy_init": lambda: None,
            "synchronize": lambda *_: None,
            "empty_cache": lambda: None,
            "mem_get_info": lambda *_: (CARD_BYTES - counted.now, CARD_BYTES),
            "host_memory_stats": dict,
            "memory_allocated": lambda *_: counted.now,
            "memory_reserved": lambda *_: counted.now,
            "max_memory_allocated": lambda *_: counted.highest,
            "max_memory_reserved": lambda *_: counted.highest,
            "reset_peak_memory_stats": lambda *_: setattr(counted, "highest", counted.now),
            "get_device_name": lambda *_: facts.name,
            "get_device_properties": lambda *_: facts,
            "get_device_capability": lambda *_: (9, 0),
            "is_bf16_supported": lambda *_: True,
            "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": lambda *_: None,
            "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)],
            "set_rng_state_all": lambda _: None,
            "manual_seed_all": lambda *_: None,
        },
        torch.cuda.amp.common: {"amp_definitely_not_available": lambda: False},
        torch.utils: {
            "swap_tensors": lambda mine, other: setattr(mine, "data", other.data)
        },  # of what a module moves or casts
        torch.accelerator: {"empty_host_cache": lambda: None},
        torch.Tensor: {"record_stream": lambda tensor, stream: None, "is_pinned": lambda *_: True},
        torch.UntypedStorage: {
            "data_ptr": lambda storage: storage._cdata if storage.device.type == "meta" else plain(storage)
        },
    }
    before = [
        (owner, name, getattr(owner, name))
        for owner, named in changes.items()
        for name in named
        if hasattr(owner, name)
    ]
    for owner, named in changes.items():
        for name, value in named.items():
            setattr(owner, name, value)
    kinds.append(fake)
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(…, device="cuda")` makes its tensor in RAM and copies it
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        kinds.remove(fake)
        for owner, name, value in before:
            setattr(owner, name, value)
