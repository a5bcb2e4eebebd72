"""Starts, watches and ends processes. No torch."""
