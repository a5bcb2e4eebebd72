"""The engine room of Loft: everything but the page.

Packages: catalog, commands, dataset, engine, families, host, images, planner, schema, system, training.
"""

__version__ = "0.1.0"
