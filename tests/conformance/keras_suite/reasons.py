"""Which of Keras' own tests cannot apply to our training, and why. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Reason:
    """Why tests cannot apply.

    Attributes:
        text: the reason, in a sentence.
        tests: patterns of their names.
    """

    text: str
    tests: tuple[str, ...]


_TRAINER = "trainers.trainer_test::TestTrainer::"
_CALLBACKS = "callbacks."
_MODEL = "models.model_test::ModelTest::"

REASONS = (
    Reason(
        "They need JAX, PyTorch's or Grain's data loaders, or Orbax, which are other backends' "
        "and are not installed for these tests.",
        (
            _TRAINER + "test_*_sparse_jax_*",
            _TRAINER + "test_fit_with_data_adapter_grain_*",
            _TRAINER + "test_fit_with_data_adapter_torch_*",
            _CALLBACKS + "orbax_checkpoint_test::*",
        ),
    ),
    Reason(
        "`steps_per_epoch`: an epoch of ours always has so many steps and goes on in the rows, "
        "from the first after the last, as with a dataset that repeats. Keras ends an epoch early "
        "where arrays run out, and begins the next one at the first row.",
        (
            _TRAINER + "test_fit_flow_steps_per_epoch_*",
            _TRAINER + "test_steps_per_epoch_not_match_*",
            _TRAINER + "test_steps_per_execution_steps_per_epoch_not_match_*",
            _TRAINER + "test_steps_per_execution_steps_per_epoch_unknown_data_size_not_match_*",
        ),
    ),
    Reason(
        "`steps_per_epoch` that `steps_per_execution` does not divide: an epoch of ours has so "
        "many steps, where Keras lets its last execution run over.",
        (_TRAINER + "test_steps_per_execution_steps_per_epoch_match_multi_epoch_*",),
    ),
    Reason(
        "`keras.config.set_max_epochs` and `set_max_steps_per_epoch`, Keras' limits for trying "
        "things out, hold for its own loop; ours goes by `epochs` and `steps_per_epoch`.",
        (_TRAINER + "test_max_epochs_and_steps",),
    ),
    Reason(
        "A model made under a `tf.distribute` strategy is refused by name: the ranks are the "
        "strategy.",
        (_CALLBACKS + "swap_ema_weights_test::*::test_swap_ema_weights_with_tf_distribute",),
    ),
    Reason(
        "It compares, to the last bit, the model as it was trained with one that was loaded. "
        "Compiled by XLA, as only the latter is still, floats are rounded differently.",
        (_CALLBACKS + "swap_ema_weights_test::*::test_swap_ema_weights_on_epoch",),
    ),
    Reason(
        "Inputs that are `None`, and structures within structures: an input or output is a column.",
        (
            _MODEL + "test_functional_deeply_nested_outputs_struct_losses",
            _MODEL + "test_functional_optional_inputs_*optional_none",
            "models.functional_test::FunctionalTest::test_required_none_raises_in_fit",
        ),
    ),
    Reason(
        "Labels for outputs in a dictionary, given in an order: Keras sorts the keys, we ask which "
        "column is for which.",
        (
            _MODEL + "test_functional_dict_outputs_dict_losses_invalid_keys",
            _MODEL + "test_functional_dict_outputs_dict_metrics_invalid_keys",
            _MODEL + "test_functional_dict_outputs_with_single_tensor",
        ),
    ),
    Reason(
        "Sparse and ragged tensors: columns of a DataFrame have rows of one shape, and values for "
        "all elements.",
        (
            _TRAINER + "test_fit_sparse_scipy_*",
            _TRAINER + "test_fit_sparse_tf_*",
            _TRAINER + "test_trainer_with_raggeds_*",
        ),
    ),
)


def reason_for(name: str) -> str | None:
    """Return why the test ``name`` cannot apply; ``None`` if it has to pass."""
    found = [r.text for r in REASONS if any(fnmatchcase(name, p) for p in r.tests)]
    if len(found) > 1:
        raise ValueError(f"{name} is named by {len(found)} reasons")
    return found[0] if found else None


def unused_patterns(names: Iterable[str]) -> list[str]:
    """Return the patterns that name none of ``names``."""
    every = list(names)
    return [
        pattern
        for reason in REASONS
        for pattern in reason.tests
        if not any(fnmatchcase(name, pattern) for name in every)
    ]
