"""What computes: the worker and whatever else loads a model. Only its modules import torch, not this package itself."""


class Cancelled(Exception):
    """The caller asked to stop; nothing was made."""
