"""What trains: the base model and its frozen weights, adapters, quantization, the loss, activation checkpointing,
FSDP.

Read: activation_checkpointing, frozen_weights, quantization, base_model, apply_plan, flow_matching_loss, fsdp,
    peft_adapters, tokenizers, training_module.
Public: activation_checkpointing, apply_plan, base_model, flow_matching_loss, frozen_weights, fsdp, peft_adapters,
    quantization, tokenizers, training_module.
"""
