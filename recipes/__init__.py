"""How things that ship with Loft were made; no part of the product.

Packages: starter.
"""
