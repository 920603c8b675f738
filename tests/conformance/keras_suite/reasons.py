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
