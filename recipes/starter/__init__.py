"""How the starter model was made: captions, pictures, autoencoder, text encoder, training.

Read: vae_2d, assemble_model, captions, drawing, character_dataset, compose_images, style_dataset, datasets,
    evaluate, sprites, text_encoder, train_vae, training_images.
"""
