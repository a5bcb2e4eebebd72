"""What a training run may be asked: its settings resolved once against the model's headers, and the rules that refuse.

The form asks at every keystroke, `python -m backend plan --train` and the trainer before anything is loaded. No torch.
Read: resolve_training, case, storage_rules, input_rules, check_training.
Public: check_training, input_rules, resolve_training.
"""
