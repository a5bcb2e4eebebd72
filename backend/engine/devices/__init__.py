"""Devices and their memory: data types, limits, out-of-memory errors, calibration.

Read: device_memory, allocator_limits, benchmark, capabilities, out_of_memory, oom_retry.
Public: allocator_limits, benchmark, capabilities, device_memory, oom_retry, out_of_memory.
"""
