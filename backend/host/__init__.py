"""Starts, watches and ends the engine worker and training runs; probes the card.

Packages: engine, process, runs, startup.
Read: access_token, background_estimates, lora_tool_process, shutdown.
Public: access_token, background_estimates, lora_tool_process, shutdown.
"""
