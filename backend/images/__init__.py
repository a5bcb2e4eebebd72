"""Pictures as files: orientation and alpha on reading, the settings chunk of a PNG.

Read: orientation, png_metadata.
Public: orientation, png_metadata.
"""
