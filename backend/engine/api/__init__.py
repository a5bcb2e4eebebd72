"""Arguments of the Python API in DiffSynth-Studio's shapes.

Read: arguments, diffsynth_arguments, diffsynth_names, load_state_dict, model_config, save_quantized.
Public: arguments, diffsynth_arguments, diffsynth_names, load_state_dict, model_config, save_quantized.
"""
