"""Loads models, places their weights and samples. Runs in the worker process and under `backend.pipelines`."""
