"""How the starter model was made: pictures, autoencoder, words, and a run of the project's own trainer."""
