"""Linear layers whose weights are kept in 8 or 4 bits, by Loft's own INT8 or by an installed package: made, loaded, saved, dequantized.

Read: backend_type, int8, bitsandbytes, torchao, comfy_kitchen, methods, layers, config, quantized_part,
    quantized_file.
Public: config, layers, quantized_file, quantized_part.
"""
