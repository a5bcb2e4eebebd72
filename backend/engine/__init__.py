"""The engine worker: loading, offloading, LoRAs, sampling. The only packages that import torch are this one and
training.

Packages: acceleration, api, devices, loading, lora, offload, pipeline, tracing, worker.
"""
