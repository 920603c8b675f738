"""A step while it runs or is traced, and temporary patches of Keras."""

from __future__ import annotations

import tensorflow as tf

_CONDITIONAL_GRAPHS = ("CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph")
_VARIABLE_NAME = "horovod_spark_runner"


def runner_variable(value: object, dtype: tf.DType | None = None) -> tf.Variable:
    """Return a variable of ours, which steps use besides the model's."""
    return tf.Variable(value, trainable=False, dtype=dtype, name=_VARIABLE_NAME)


def is_runner_variable(variable: tf.Variable) -> bool:
    """Return whether `runner_variable` created the variable."""
    return bool(variable.name.partition(":")[0] == _VARIABLE_NAME)


class Scope:
    """A step while it runs or is traced: names for its collectives, and their scopes.

    A function of the user's own with ``@tf.function`` on it is traced once and used again in other
    steps. So names are given once only, and it is noted that there is such a function.
    """

    def __init__(self) -> None:
        self.nested = False
        self._number = 0
        self.graph: tf.Graph | None = None

    def enter(self) -> None:
        """Begin a step."""
        self.graph = _current_graph()
        if self.graph is None:  # what runs eagerly may use the names of the step before
            self._number = 0

    @property
    def outermost(self) -> bool:
        """True if this is the step itself, not a function within it."""
        return _current_graph() is self.graph

    def note(self) -> None:
        """Record that operations here depend on this rank's rows."""
        self.nested = self.nested or not self.outermost

    def name(self, kind: str) -> str:
        """Return a name for a collective."""
        self.note()
        self._number += 1
        return f"{kind}.{self._number}"


def _current_graph() -> tf.Graph | None:
    """Return the graph that is being traced; ``None`` while TensorFlow runs eagerly."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def in_condition(scope: Scope) -> bool:
    """Return whether the current trace, within the step, is inside a condition or loop."""
    graph = _current_graph()
    while graph is not None and graph is not scope.graph:
        if type(graph).__name__ in _CONDITIONAL_GRAPHS:
            return True
        graph = getattr(graph, "outer_graph", None)
    return False
