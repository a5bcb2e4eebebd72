"""Building blocks of the page: forms from settings, field synchronisation, drawing of SVG, formatting.

Read: field_sync, formatting, form, handler_errors, svg, theme.
Public: field_sync, form, formatting, handler_errors, svg, theme.
"""
