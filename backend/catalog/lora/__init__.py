"""What a LoRA file is and which model it fits, from its keys, shapes and metadata.

Read: metadata, keys, peft_config, peft_patterns, alpha, block_norms, module_names, identify, module_lookup, role_pairs,
    fit, target_modules.
Public: alpha, block_norms, fit, identify, keys, metadata, module_lookup, module_names, peft_config, role_pairs,
    target_modules.
"""
