"""Full training states and exported results, written atomically in the background; the run's events.

Read: async_writer, reporter, set_aside, state, thumbnail.
Public: async_writer, reporter, set_aside, state, thumbnail.
"""
