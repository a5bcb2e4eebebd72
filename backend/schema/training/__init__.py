"""The settings of a training run, and the reference page made from all settings.

Read: inputs, method, output, config, settings_reference.
Public: config, method.
"""
