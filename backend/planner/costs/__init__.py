"""Bytes and seconds of weights, activations, optimizers and files.

Read: layout, quantized_bytes, untraced_model, model_sizes, acceleration_bytes, gpu_table, device_speed,
    phase_costs, training_method, required_traces, cpu_training, disk_usage, optimizers, prompt_length,
    weight_bytes.
Public: cpu_training, device_speed, disk_usage, layout, model_sizes, optimizers, phase_costs, prompt_length,
    quantized_bytes, required_traces, training_method, weight_bytes.
"""
