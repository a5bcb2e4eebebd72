"""What programs put before the names of a model's tensors, and what they slip in between: one answer for tensors,
markers and header entries.

A prefix is any run of these words ("pipe.dit.", "module.model.diffusion_model."). Which tensors a part has is found by
its own names (`backend.catalog.models.match_parts`), whatever stands before them; this module says when two names mean
the same module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

WORDS = frozenset(
    {
        "_orig_mod",  # torch.compile
        "_fsdp_wrapped_module",
        "_checkpoint_wrapped_module",
        "module",  # DataParallel
        "model",
        "diffusion_model",
        "transformer",
        "unet",
        "dit",
        "net",
        "pipe",
        "pipeline",
        "denoiser",
        "state_dict",
    }
)
INSIDE = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # wrappers of single blocks


def unwrapped(name: str) -> str:
    """`name` without the wrappers that a program puts around a module, at its beginning or inside."""
    for word in INSIDE:
        while name.startswith(word):
            name = name[len(word) :]
        if f".{word}" in name:
            name = name.replace(f".{word}", ".")
    return name


def bare(name: str) -> str:
    """`name` without the words of prefixes at its beginning; at least its last word stays."""
    words = unwrapped(name).split(".")
    start = 0
    while start < len(words) - 1 and words[start] in WORDS:
        start += 1
    return ".".join(words[start:])


class Modules:
    """Names of modules, found by any name that differs from theirs by a prefix only."""

    def __init__(self, names: Iterable[str]):
        self.names = frozenset(names)
        self._endings: dict[str, list[str]] | None = None

    def meant(self, name: str) -> tuple[str, ...]:
        """The modules that `name` means: the one of that very name, else all that end with it, prefix words left
        aside."""
        name = unwrapped(name)
        if name in self.names:
            return (name,)
        return tuple(self._by_ending().get(bare(name), ()))

    def _by_ending(self) -> Mapping[str, list[str]]:
        if self._endings is None:
            self._endings = {}
            for name in self.names:
                words = name.split(".")
                for start in range(len(words)):
                    self._endings.setdefault(".".join(words[start:]), []).append(name)
        return self._endings
