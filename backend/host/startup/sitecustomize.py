"""Run by Python itself when a child process of Loft starts: Loft's own packages are found by their names (see
`host/isolation.py`)."""

import importlib.machinery
import importlib.util
import os
import sys

OWN = ("backend", "studio", "tests", "benchmarks")
_here = os.path.dirname(os.path.abspath(__file__))
_project = os.path.dirname(os.path.dirname(os.path.dirname(_here)))


class _OwnPackages:
    """Finds Loft's packages in its folder, which is on no path: nothing else that lies there is a module."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.machinery.PathFinder.find_spec(name, [_project]) if name in OWN else None


def _run_the_systems_own(path):
    """Python runs one `sitecustomize`, the first: one that the system or the environment brings is run from here."""
    found = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if found is not None and found.loader is not None:
        found.loader.exec_module(importlib.util.module_from_spec(found))


sys.meta_path.insert(0, _OwnPackages)
sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or os.curdir) != _here]
_run_the_systems_own(sys.path)
