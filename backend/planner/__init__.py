"""Will it fit, and how long will it take: the memory plan, made from headers without torch.

Packages: costs, rules.
Read: candidates, explain, history, workload, suggestions, training_step, training_candidates,
    what_fits, plan, page_estimate, predict_peak.
Public: history, page_estimate, plan, predict_peak, suggestions, what_fits, workload.
"""
