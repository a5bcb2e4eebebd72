"""Tools on LoRA files: convert, merge, resize, extract, bake, metadata.

Read: arguments, key_tables, text_encoder_keys, content, export_formats, self_contained, safetensors_writer,
    convert, merge, commands, command_line.
Public: command_line.
"""
