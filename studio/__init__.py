"""The page, in Gradio: one package for each tab. Never imports torch.

Packages: generate, models, panels, serving, state, train, widgets.
Read: preferences, app.
"""
