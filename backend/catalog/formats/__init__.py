"""Readers of headers: safetensors, GGUF, zipped PyTorch checkpoints.

Read: header, duplicate_tensors, gguf, safetensors, torch_pickle, read.
Public: duplicate_tensors, header, read, safetensors, torch_pickle.
"""
