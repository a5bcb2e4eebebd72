"""The page: a Gradio process that never imports torch."""
