"""From files to modules: meta build and assignment, dequantization, FP8 storage, lazy imports.

Read: gguf_dequantize, dequantize, lazy_imports, disk_reader, pinned_copy, load, check_finite, fp8_storage,
    tensor_source.
Public: check_finite, dequantize, disk_reader, fp8_storage, gguf_dequantize, lazy_imports, load, pinned_copy,
    tensor_source.
"""
