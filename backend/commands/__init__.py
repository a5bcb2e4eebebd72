"""What `python -m backend` runs beyond the commands that other packages bring.

Read: plan, plan_report.
"""
