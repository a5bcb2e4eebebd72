"""Trains LoRAs and models; one process (or one launcher) per run."""
