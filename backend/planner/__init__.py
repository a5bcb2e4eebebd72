"""Will it fit, and how long will it take: the memory plan, made from headers without torch.

Packages: costs.
Read: candidates, check_training, explain, history, workload, suggestions, training_step, training_candidates,
    what_fits, plan, page_estimate, predict_peak.
Public: check_training, history, page_estimate, plan, predict_peak, suggestions, what_fits, workload.
"""
