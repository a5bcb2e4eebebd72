"""The Generate tab.

Read: gallery, reference_images, restore_settings, lora_rows, tab, events, layout.
Public: events, gallery, layout, lora_rows, tab.
"""
