"""What each kind of adapter adds to a weight: LoRA, LoHa, LoKr, full differences, DoRA, OFT.

Read: delta, scale, module_tensors, dora, oft, build.
Public: build, delta, module_tensors, oft, scale.
"""
