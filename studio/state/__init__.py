"""What the tabs share: places, engine, library, saved forms, output files.

Read: saved_forms, context, library, output_files.
Public: context, library, output_files, saved_forms.
"""
