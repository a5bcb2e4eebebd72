"""Allocation traces of networks on the meta device, fitted to formulas for the planner; live bytes while a job
runs.

Read: allocation_recorder, caching_allocator, forward_calls, cpu_training_step, fit, sample_points,
    cpu_training_fit, live_tensors, training_fit, vision_fit, trace, server.
Public: live_tensors.
"""
