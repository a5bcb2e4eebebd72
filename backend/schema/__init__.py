"""What the processes say to each other: settings, requests, events, plans, and the folders of the data directory.

Packages: training.
Read: json_values, messages, allowed_classes, login, measured_choices, memory_plan, paths, settings_field, settings,
    preferences, request, typed_fields, untrusted.
Public: allowed_classes, json_values, login, measured_choices, memory_plan, messages, paths, preferences, request,
    settings, typed_fields, untrusted.
"""
