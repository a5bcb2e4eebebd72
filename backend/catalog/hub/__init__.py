"""Downloads from model hubs, and headers read by range requests.

Read: clients, download, part_entries, remote_headers.
Public: download, part_entries, remote_headers.
"""
