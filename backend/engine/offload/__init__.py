"""VRAM management: the four states of weights, block streaming with prefetch, offloaded weights under autograd.

Read: autograd, vram_states, blocks, pinned_memory, prefetch, block_storage, transfer, forward_hooks, placement.
Public: blocks, placement, prefetch, transfer, vram_states.
"""
