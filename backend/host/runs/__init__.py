"""Training runs as folders: creation, start, stop, and the status derived from their files.

Read: status, runs.
Public: runs, status.
"""
