"""What several families have in common: networks that they share, and names of their projects. No family is named here.

Read: shapes, packing, flow_schedule, tokenizers, vae, clip, t5, autoencoder_kl, text_encoding, bfl_keys, unet_keys.
Public: shapes, packing, flow_schedule, tokenizers, vae, clip, t5, autoencoder_kl, text_encoding, bfl_keys, unet_keys.
"""
