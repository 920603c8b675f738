"""TensorFlow's and Keras' global random generators.

Those of random layers are variables of the model. TensorFlow's stateful ops (``tf.random.normal``
inside a compiled step) keep a counter in their kernel that nothing can read: use ``keras.random``
or ``tf.random.Generator`` in code whose runs are to be resumed exactly.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import tensorflow as tf
from keras.src.random.seed_generator import global_seed_generator

from ...checkpoint.model_state import Variable, separate_seed
from ...checkpoint.rank_state import capture_random, restore_random


def generators() -> dict[str, Variable]:
    """Return the states of the generators, as variables by name.

    They come into being at their first use, which leaves no trace here: Keras draws the seed of its
    own from Python's generator.
    """
    before = random.getstate()
    # Keras has no public name for the generator behind layers without a seed of their own.
    keras_seed = global_seed_generator().state
    tensorflow_state = tf.random.get_global_generator().state
    random.setstate(before)
    return {"tensorflow": tensorflow_state, "keras": keras_seed}


@contextlib.contextmanager
def nothing_drawn() -> Iterator[None]:
    """Put all global generators, Python's and NumPy's too, back to where they were before."""
    states = generators()
    values, arrays = capture_random(states)
    try:
        yield
    finally:
        restore_random(values, arrays, states)


def separate_generators(rank: int) -> None:
    """Give Keras' global generator a separate stream on this rank.

    Code that draws from it without a seed would draw the same numbers on every rank.
    """
    generator = global_seed_generator()
    generator.state.assign(separate_seed(generator.state.numpy(), rank))
