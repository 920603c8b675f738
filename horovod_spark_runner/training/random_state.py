"""The random generators of a rank, as JSON and arrays.

Python's, NumPy's legacy one, TensorFlow's global generator and Keras's global seeds. Those of
random layers are variables of the model. TensorFlow's stateful ops (``tf.random.normal`` inside a
compiled step) keep a counter in their kernel that nothing can read: use ``keras.random`` or
``tf.random.Generator`` in code whose runs are to be resumed exactly.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.random.seed_generator import global_seed_generator

from ..storage.arrays import Arrays
from .state import separate_seed


def capture_random() -> tuple[dict[str, Any], Arrays]:
    """Return the state of all global generators of this process."""
    make_generators()
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": [version, gauss],
        "numpy": [kind, int(position), int(has_gauss), float(cached)],
    }
    arrays = {
        "python": np.array(words, np.uint32),
        "numpy": np.array(keys),
        "tensorflow": np.array(tf.random.get_global_generator().state.numpy()),
        # Keras has no public name for the generator behind layers without a seed of their own.
        "keras": np.array(global_seed_generator().state.numpy()),
    }
    return state, arrays


def restore_random(state: dict[str, Any], arrays: Arrays) -> None:
    """Put all global generators into a state that `capture_random` returned."""
    make_generators()
    version, gauss = state["python"]
    random.setstate((version, tuple(int(word) for word in arrays["python"]), gauss))
    kind, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, arrays["numpy"], position, has_gauss, cached))
    tf.random.get_global_generator().state.assign(arrays["tensorflow"])
    global_seed_generator().state.assign(arrays["keras"])


def make_generators() -> None:
    """Make the generators that come into being at their first use, without a trace of it.

    Keras draws the seed of its own from Python's generator.
    """
    before = random.getstate()
    global_seed_generator()
    tf.random.get_global_generator()
    random.setstate(before)


def separate_generators(rank: int) -> None:
    """Give Keras's global generator a stream of this rank's own.

    Code that draws from it without a seed would draw the same numbers on every rank.
    """
    generator = global_seed_generator()
    generator.state.assign(separate_seed(generator.state.numpy(), rank))
