"""The state of a run, evaluation, saving, resuming, and restarts after out-of-memory errors.

Read: state, export, save, resume, check_weights, evaluation, oom_restart, peak_report.
Public: check_weights, evaluation, export, oom_restart, peak_report, resume, save, state.
"""
