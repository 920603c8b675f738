"""The private names of Keras and TensorFlow that this engine uses: nothing public does the same.

A release without one fails here, at import. Private attributes of objects are used where they are
needed; `tests/training/test_private_names.py` lists them.
"""

from __future__ import annotations

import keras.src as _keras
from tensorflow.python.framework import auto_control_deps_utils as _dependencies

# Per thread: names that were given to layers, seeds, the dtype policy (`fresh_keras_state`).
global_state = _keras.backend.common.global_state
global_seed_generator = _keras.random.seed_generator.global_seed_generator
# Its `reduce_weighted_values` divides every loss; a replacement divides by what all ranks have.
loss_module = _keras.losses.loss
# Matches metrics with outputs as `compile` does.
CompileMetrics = _keras.trainers.compile_utils.CompileMetrics
# Reads and writes weights in a ``.keras`` file; a replacement does so without copies.
H5IOStore = _keras.saving.saving_lib.H5IOStore
# Gives tf2onnx the names of NumPy that it misses.
patch_tf2onnx = _keras.export.tf2onnx_lib.patch_tf2onnx
# Which of a traced step's variables it only reads.
read_only_inputs = _dependencies.get_read_only_resource_input_indices_graph
