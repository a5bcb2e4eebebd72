"""Panels that several tabs show: the memory estimate, the worker's and a run's status.

Read: run_differences, run_status, engine_status, memory_estimate, memory_graph.
Public: engine_status, memory_estimate, memory_graph, run_status.
"""
