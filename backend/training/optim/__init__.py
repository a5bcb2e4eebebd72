"""Optimizers, schedules, EMA, and the optimizer state offloaded to RAM.

Read: cpu_offload, optimizers.
Public: cpu_offload, optimizers.
"""
