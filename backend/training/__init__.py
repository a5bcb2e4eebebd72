"""A training run: data, encodings, model, optimizer, loop, checkpoints.

Packages: checkpoint, encoding, model, optim, run.
Read: loop, dry_run, launch, setup.
"""
