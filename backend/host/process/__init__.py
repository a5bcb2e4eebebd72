"""Child processes, their logs and events, and the lock on the data folder.

Read: isolation, processes, data_folder_lock, environment, event_log.
Public: data_folder_lock, environment, event_log, isolation, processes.
"""
