"""The tab of LoRAs and models.

Read: config_from_lora, lora_thumbnails, cards, lora_tools, tab, events.
Public: events, tab.
"""
