"""What a model file or LoRA file is, from its header alone.

Packages: formats, hub, lora, models, quantization.
Read: family, json_files, key_prefixes, spec, state_dict_keys.
Public: family, json_files, key_prefixes, spec, state_dict_keys.
"""
