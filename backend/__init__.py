"""Loft's backend: the engine, the trainer, and what plans, starts and watches them."""

__version__ = "0.1.0"
