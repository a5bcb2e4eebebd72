"""A training set without torch: metadata, captions, crops, buckets, and what a run will be given to do.

Read: captions, extra_inputs, metadata, dataset, bucket_sampler, crops, reference_images, check_inputs,
    generated_prompts, look_ahead.
Public: bucket_sampler, captions, check_inputs, crops, dataset, extra_inputs, generated_prompts, look_ahead,
    reference_images.
"""
