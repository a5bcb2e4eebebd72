"""A request becomes pictures: prompt embeddings, denoising, decoding, and fallbacks when memory runs out.

Read: part_loading, part_placement, oom_fallback, image_tensors, request_checks, sampler, guidance, denoise,
latent_preview, pipeline.
Public: guidance, image_tensors, latent_preview, part_loading, pipeline, request_checks, sampler.
"""
