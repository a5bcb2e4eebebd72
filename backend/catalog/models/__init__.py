"""Which model files are: identification, the parts of a checkpoint, a model's folder, the library.

Read: capabilities, checkpoint_files, match_parts, model_folder, identify, scan_cache, library, supported,
    token_count.
Public: capabilities, checkpoint_files, identify, library, match_parts, model_folder, scan_cache, supported,
    token_count.
"""
