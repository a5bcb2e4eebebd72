"""The engine worker as the studio sees it: the queue, its state, its process.

Read: pending_requests, snapshot, failed_requests, job_state, worker_process, client.
Public: client, snapshot, worker_process.
"""
