"""Which layers of a module are quantized and by which method: DiffSynth-Studio's `QuantizeConfig` and `MixedQuantizeConfig`, with its meaning."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from backend.catalog.quantization.methods import METHODS, Rule, check_method, check_package, write_storage
from backend.engine.devices import out_of_memory
from backend.engine.quantization.backend_type import Backend, State
from backend.engine.quantization.layers import dequantized, is_quantized
from backend.engine.quantization.methods import BACKENDS
from backend.schema.json_values import texts
from backend.schema.messages import Trouble
from backend.schema.untrusted import parsed
from backend.system.text_files import ends_with

MODES = ("dynamic", "dequant_once")
MOST_NAMES = 1_000_000  # of tensors in one file
Device = str | torch.device | None


class _Quantizes:
    """What both configs can do."""

    load_prequantized: bool

    def all(self) -> tuple[QuantizeConfig, ...]:
        """The single configs."""
        raise NotImplementedError

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of all that are used."""
        return tuple(config.method for config in self.all())

    @property
    def storage(self) -> str:
        """As a plan is told of it (`Work.quantized`)."""
        return write_storage(
            Rule(one.method, tuple(one.exclude_modules or ()), one.target_modules and tuple(one.target_modules))
            for one in self.all()
        )

    def config_of(self, name: str) -> QuantizeConfig | None:
        """The one that means the linear layer called `name`."""
        return next((config for config in self.all() if config.matches(name)), None)

    def chosen(self, module: nn.Module) -> dict[str, QuantizeConfig]:
        """Name -> config of each layer that is to be quantized and is not yet. Raises Trouble where there is none, where a target is not
        there, and where two configs mean one layer."""
        layers = _linears(module)
        found: dict[str, QuantizeConfig] = {}
        for config in self.all():
            config.check_targets(module, layers)
            for name in filter(config.matches, layers):
                if name in found:
                    raise Trouble(
                        "bad_value",
                        f"Two configs of a MixedQuantizeConfig mean the layer {name}: {found[name].method} and {config.method}.",
                        hint="Exclude it from one of them.",
                    )
                found[name] = config
        if not found:
            raise Trouble("bad_value", f"{type(module).__name__} has no linear layer that is to be quantized.")
        return found

    def quantize_model(self, model: nn.Module, compute_device: Device = None, model_device: Device = None) -> nn.Module:
        """Quantizes the chosen layers of a loaded `model` in place, each by itself on `compute_device` (None: where it lies), to stay on
        `model_device` (None: where it was quantized). Does nothing for `load_prequantized`. Returns `model`."""
        for name, config in {} if self.load_prequantized else self.chosen(model).items():
            layer = model.get_submodule(name).to(compute_device)
            replace_layer(model, name, config.quantized(layer, name).to(model_device))
        return model

    def dequantize_model(
        self,
        model: nn.Module,
        compute_dtype: torch.dtype = torch.bfloat16,
        compute_device: Device = None,
        model_device: Device = None,
    ) -> nn.Module:
        """Makes quantized layers plain ones of `compute_dtype` where the mode is "dequant_once", else does nothing. Returns `model`."""
        if self.mode == "dequant_once":
            for name in [name for name, layer in model.named_modules() if name and is_quantized(layer)]:
                layer = dequantized(model.get_submodule(name).to(compute_device), compute_dtype)
                replace_layer(model, name, layer.to(model_device))
        return model

    def is_quantized_linear(self, module: nn.Module) -> bool:
        """Whether `module` is a quantized layer of one of these methods."""
        return isinstance(module, nn.Linear) and any(BACKENDS[name].owns(module) for name in self.methods)

    def prepare_for_prequantized_load(self, model: nn.Module, compute_dtype: torch.dtype = torch.bfloat16) -> nn.Module:
        """Replaces the chosen layers by empty quantized ones, for `load_state_dict(unflatten_state_dict(...), assign=True)`."""
        for name, config in self.chosen(model).items():
            replace_layer(model, name, config.empty(model.get_submodule(name), compute_dtype))
        return model

    def flatten_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> tuple[State, dict[str, str]]:
        """The state of a quantized model as plain tensors and a header of strings, as `safetensors.torch.save_file` takes them."""
        flat, metadata = {}, {"format": "pt"}
        for config, state in self._by_config(state_dict):
            if config is None:
                flat |= state
                continue
            tensors, said = config.backend.flatten(state)
            names = [*_named(metadata), *_named(said)]
            flat, metadata = flat | tensors, metadata | said | ({"tensor_names": json.dumps(names)} if names else {})
        return {name: tensor.detach().contiguous() for name, tensor in flat.items()}, metadata

    def unflatten_state_dict(self, state_dict: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> State:
        """The inverse of `flatten_state_dict`."""
        state: State = {}
        for config, flat in self._by_config(state_dict):
            state |= flat if config is None else config.backend.unflatten(flat, _about(flat, metadata or {}))
        return state

    def _by_config(self, tensors: Mapping[str, torch.Tensor]) -> list[tuple[QuantizeConfig | None, State]]:
        """The tensors of the layers of each config, and of none."""
        modules = _modules(tensors)
        groups: dict[int, tuple[QuantizeConfig | None, State]] = {}
        for key, tensor in tensors.items():
            module = next((name for name in _owners(key) if name in modules), "")
            config = self.config_of(module) if module else None
            groups.setdefault(id(config), (config, {}))[1][key] = tensor
        return list(groups.values())


@dataclass(frozen=True)
class QuantizeConfig(_Quantizes):
    """How linear layers of a module are quantized, and the functions that do it.

    `method`: a name of `catalog.quantization.methods.METHODS`. `mode` "dynamic": layers stay quantized and dequantize when they are
    called; "dequant_once": they are plain layers again at once, with the error of quantization. `target_modules`, `exclude_modules`:
    lists of names; a layer is meant whose full name is an entry, or ends in "." and an entry. None targets all. `backend_config_kwargs`:
    settings of the method (`describe_quant_method`). `load_prequantized`: the file holds quantized weights. Raises Trouble for what makes
    no sense, and where the method's package is not installed.
    """

    method: str | None = None
    mode: str = "dynamic"
    target_modules: list[str] | None = None
    exclude_modules: list[str] | None = None
    backend_config_kwargs: Mapping[str, object] = field(default_factory=dict)
    load_prequantized: bool = False

    def __post_init__(self):
        if self.method is None:
            raise Trouble("bad_value", "QuantizeConfig needs a method.", hint=f"There are {', '.join(METHODS)}.")
        check_method(self.method, "QuantizeConfig")
        if self.mode not in MODES:
            raise Trouble("bad_value", f"QuantizeConfig(mode={self.mode!r:.40}) is neither {' nor '.join(MODES)}.")
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            if value is not None and not (
                isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
            ):
                raise Trouble("bad_value", f"QuantizeConfig({name}={value!r:.60}) is no list of module names.")
        if not isinstance(self.backend_config_kwargs, Mapping):
            raise Trouble(
                "bad_value",
                f"QuantizeConfig(backend_config_kwargs={self.backend_config_kwargs!r:.60}) is no dictionary.",
            )
        check_package(self.method, "QuantizeConfig")
        self.settings()

    def all(self) -> tuple[QuantizeConfig, ...]:
        return (self,)

    @property
    def backend(self) -> Backend:
        return BACKENDS[self.method]

    def matches(self, name: str) -> bool:
        """Whether the linear layer called `name` is to be quantized."""
        meant = self.target_modules is None or any(ends_with(name, one) for one in self.target_modules)
        return meant and not any(ends_with(name, one) for one in self.exclude_modules or ())

    def check_targets(self, module: nn.Module, layers: Mapping[str, nn.Linear]) -> None:
        """Raises Trouble for a target that means none of `layers`, those of `module`."""
        for target in self.target_modules or ():
            if not any(ends_with(name, target) for name in layers):
                kinds = sorted({name.rpartition(".")[2] for name in layers})
                raise Trouble(
                    "bad_value",
                    f"target_modules names {target!r:.80}, and {type(module).__name__} has no linear layer of that name.",
                    hint=f"Names of its layers end in {', '.join(kinds)[:300]}.",
                )

    def quantized(self, layer: nn.Linear, name: str = "") -> nn.Linear:
        """`layer` (called `name`) quantized, on the device where it lies. Raises Trouble("not_supported") for what the package cannot do
        here, a lack of memory as it is."""
        device = layer.weight.device
        try:
            return self.backend.quantize(layer, self.settings())
        except (ImportError, NotImplementedError, RuntimeError, AssertionError, ValueError) as error:
            if out_of_memory.is_oom(error, device):
                raise
            raise Trouble(
                "not_supported",
                f"The quantization {self.method} does not work here for {name or 'a layer'}: {str(error)[:300]}",
                hint="Use int8, or another method.",
            ) from None

    def empty(self, layer: nn.Linear, dtype: torch.dtype) -> nn.Linear:
        """An empty quantized layer of the same sizes, on the meta device."""
        return self.backend.empty(layer, dtype, self.settings())

    def settings(self) -> dict[str, object]:
        """Of the method, with its defaults. Raises Trouble for a name that it does not have."""
        unknown = set() if self.backend.open_settings else set(self.backend_config_kwargs) - set(self.backend.settings)
        if unknown:
            raise Trouble(
                "bad_value",
                f"backend_config_kwargs names {min(map(str, unknown))!r:.40}, which {self.method} does not have.",
                hint=f"It takes {', '.join(self.backend.settings) or 'none'}.",
            )
        return {**self.backend.settings, **self.backend_config_kwargs}


@dataclass(frozen=True)
class MixedQuantizeConfig(_Quantizes):
    """Several `QuantizeConfig`s for sets of layers that do not overlap, with the same functions. All have one mode; `load_prequantized`
    is said here and not in them."""

    configs: list[QuantizeConfig] | None = None
    load_prequantized: bool = False

    def __post_init__(self):
        if not isinstance(self.configs, list | tuple) or not self.configs:
            raise Trouble("bad_value", "MixedQuantizeConfig needs a list of QuantizeConfig.")
        for config in self.configs:
            if not isinstance(config, QuantizeConfig):
                raise Trouble("bad_value", f"MixedQuantizeConfig holds {config!r:.60}, which is no QuantizeConfig.")
            if config.load_prequantized:
                raise Trouble(
                    "bad_value",
                    "load_prequantized is set in a config inside a MixedQuantizeConfig.",
                    hint="Set it on the MixedQuantizeConfig itself.",
                )
        modes = sorted({config.mode for config in self.configs})
        if len(modes) > 1:
            raise Trouble(
                "bad_value", f"The configs of a MixedQuantizeConfig differ in their mode: {', '.join(modes)}."
            )

    def all(self) -> tuple[QuantizeConfig, ...]:
        return tuple(self.configs)

    @property
    def method(self) -> str:
        return " + ".join(self.methods)

    @property
    def mode(self) -> str:
        return self.configs[0].mode


def describe_quant_method(name: str) -> None:
    """Prints what a method is and which `backend_config_kwargs` it takes."""
    check_method(name, "describe_quant_method")
    method, backend = METHODS[name], BACKENDS[name]
    taken = ", ".join(f"{key} = {value!r}" for key, value in backend.settings.items()) or "none"
    if backend.open_settings:
        taken = "those of torchao's configuration of this method"
    print(
        f"method: {name}\nbackend: {method.package or 'Loft'}\ndetail: {method.title}\nbackend_config_kwargs: {taken}"
    )


def replace_layer(module: nn.Module, name: str, layer: nn.Module) -> None:
    """Puts `layer` in the place `name` (dotted) of `module`."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, layer)


def _linears(module: nn.Module) -> dict[str, nn.Linear]:
    """Linear layers that are not quantized, and no subclass with a meaning of its own."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if name and type(layer) is nn.Linear and not is_quantized(layer)
    }


def _owners(key: str):
    """Every module that a tensor's key can lie in, the innermost first."""
    path = key.rpartition(".")[0]
    while path:
        yield path
        path = path.rpartition(".")[0]


def _modules(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Names of modules that have a weight, in whichever form."""
    found = {key.removesuffix(".weight") for key in tensors if key.endswith(".weight")}
    return found | {key.rpartition("._weight_qdata")[0] for key in tensors if key.endswith("._weight_qdata")}


def _named(metadata: Mapping[str, str]) -> list[str]:
    return texts(parsed(metadata.get("tensor_names", "[]"), list, where="tensor_names"), most=MOST_NAMES)


def _about(flat: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """Of torchao's header, what is said of tensors of `flat`."""
    modules = {owner for key in flat for owner in _owners(key)}
    names = [name for name in _named(metadata) if name.rpartition(".")[0] in modules and name in metadata]
    return {name: metadata[name] for name in names} | {"tensor_names": json.dumps(names)}
