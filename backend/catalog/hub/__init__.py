"""Downloads from model hubs, and headers read by range requests.

Read: clients, download, part_entries, find_files, remote_headers.
Public: download, find_files, part_entries, remote_headers.
"""
