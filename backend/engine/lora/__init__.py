"""LoRA files applied to modules: read, resolve, fuse (cold) or attach as side branches (hot).

Packages: algorithms, tools.
Read: fuse, duplicate_modules, module_index, read, loaded, side_branch, adapters, low_memory_linear,
    trained_adapters.
Public: adapters, duplicate_modules, fuse, low_memory_linear, read, side_branch, trained_adapters.
"""
