"""Runs in this process, as tests of the trainer have them."""

from tests.training.conftest import events, loaded, pairs, pictures, run_training, tiny_edit  # noqa: F401
