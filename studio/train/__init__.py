"""The Train tab: datasets, the form, runs.

Read: applied_plan, dataset_captions, caption_editor, presets, tab, events.
Public: events, tab.
"""
