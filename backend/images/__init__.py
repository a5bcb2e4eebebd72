"""Pictures as files: orientation and alpha on reading, the settings chunk of a PNG.

Read: orientation, picture_sizes, png_metadata.
Public: orientation, picture_sizes, png_metadata.
"""
