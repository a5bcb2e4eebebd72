"""What makes steps faster: compile, FP8 matrix products, the step cache.

Read: compile_blocks, first_block_cache, fp8_matmul, apply.
Public: apply, first_block_cache, fp8_matmul.
"""
