"""Prompt embeddings, conditioning and latents of samples: encoded once, cached by what they depend on.

Read: open_images, encoding_cache, cache_key, distributed_encoding, sample_source, conditioning, draw,
    prior_preservation, prepare, encoded_dataset, peak_meter.
Public: cache_key, conditioning, distributed_encoding, draw, encoded_dataset, encoding_cache, peak_meter, prepare,
    sample_source.
"""
