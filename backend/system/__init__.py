"""The operating system and the card: atomic writes, text decoding, the GPU probe, Windows' video-memory budget.

Read: atomic_files, dxgi, gpu_probe, process_record, text_files.
Public: atomic_files, dxgi, gpu_probe, process_record, text_files.
"""
