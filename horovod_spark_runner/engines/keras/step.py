"""The steps of the training on this rank, as TensorFlow runs them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from ...errors import ModelError
from ...training.agreement import NOTHING
from ...training.progress import Logs
from .exchange import GradientExchange, StepResult
from .model import Nest, replaced

# Optimizers that do nothing when they are built but to make variables.
_PLAIN = (
    keras.optimizers.Adadelta,
    keras.optimizers.Adagrad,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Ftrl,
    keras.optimizers.Lamb,
    keras.optimizers.Lion,
    keras.optimizers.RMSprop,
    keras.optimizers.SGD,
)
_Train = Callable[[Nest, tf.Tensor], StepResult]


class Steps:
    """Runs a model's ``train_step`` and ``test_step`` together with all other ranks.

    As `Model.fit` does, the steps are compiled for batches of any size, and not converted by
    AutoGraph. Nearly all training steps have a full batch on every rank. Their graph knows that all
    ranks count the same, and is called as it is: that ``tf.function`` looks through the arguments
    for the graph that fits them takes about as long as a small layer.

    Args:
        exchange: connects the model to the other ranks.
        data: one batch, as ``train_step`` takes it.
        test_data: one batch, as ``test_step`` takes it.
        eager: whether the model is not to be compiled.
        custom: whether the steps run code of the user, which may compile parts of itself.
        once: whether what Keras makes in a first step may be made outside of it; see
            `makes_only_variables`.

    Attributes:
        graph: of a training step; ``None`` where it is not compiled.
    """

    def __init__(
        self,
        exchange: GradientExchange,
        data: Nest,
        test_data: Nest,
        *,
        eager: bool,
        custom: bool,
        once: bool,
    ) -> None:
        self._exchange = exchange
        self._eager = eager
        self._custom, self._once = custom, once and not custom
        self._kind = tf.nest.map_structure(_any_batch, data)
        self._test_kind = tf.nest.map_structure(_any_batch, test_data)
        self._no_requests = _control(NOTHING)
        self._train: _Train = exchange.step
        self._train_full: _Train | None = exchange.equal_step
        self._test: Callable[[Nest], Logs | None] = exchange.test_step
        self.trace()

    def trace(self) -> None:
        """Compile the steps, again where layers hold other constants than before.

        Raises:
            ModelError: a layer has a compiled function that knows of one kind of step only.
        """
        self.graph: tf.Graph | None = None
        if self._eager:
            self._train_full = None if self._custom else self._train_full
            return
        exchange = self._exchange
        control = tf.TensorSpec(self._no_requests.shape, tf.float32)
        kind = (self._kind, control)
        train = tf.function(exchange.step, autograph=False, input_signature=kind)
        self._train, self._train_full = train, None
        self._test = tf.function(
            exchange.test_step, autograph=False, input_signature=(self._test_kind,)
        )
        if self._custom and exchange.size > 1:
            traced = train.get_concrete_function()
            self._train, self.graph = traced, traced.graph
            if exchange.scope.nested:
                return  # what was traced within the step is used again, for any part of a batch
        full = tf.function(exchange.equal_step, autograph=False)
        # What the user's own steps do while they are traced, Keras does twice.
        with variables_made_outside() if self._once else contextlib.nullcontext():
            traced = full.get_concrete_function(*kind)
        self._train_full, self.graph = traced, traced.graph
        if exchange.size == 1:
            self._train = self._train_full
        elif exchange.scope.nested:
            raise ModelError(
                "a layer or metric computes losses or means inside a function of its own with "
                "@tf.function, which cannot be trained on several ranks; take the decorator off: "
                "the whole step is compiled anyway"
            )

    def train_full(self, data: Nest, requests: Sequence[bool]) -> StepResult:
        """Run a step where every rank has a full batch.

        Args:
            data: what ``train_step`` takes.
            requests: what this rank asks of all; see `Agreement`.

        Returns:
            The step's logs, and how many ranks asked for each; ``None`` where ranks do not meet in
            every step.
        """
        control = _control(requests) if any(requests) else self._no_requests
        if self._train_full is None:
            return self.train(data, 1.0 / self._exchange.size, requests)
        return self._train_full(data, control)

    def train(self, data: Nest, fraction: float, requests: Sequence[bool]) -> StepResult:
        """Run a step where this rank has ``fraction`` of the rows of all."""
        self._exchange.set_fraction(fraction)
        return self._train(data, _control(requests))

    def test(self, data: Nest, fraction: float) -> Logs | None:
        """Run a test step where this rank has ``fraction`` of the rows of all."""
        self._exchange.set_fraction(fraction)
        return self._test(data)


def makes_only_variables(model: keras.Model) -> bool:
    """Return whether Keras' first step only creates variables of constant initial values.

    What an optimizer assigns to them when it is built, or a metric of the user's own when it is
    called first, would be done in every step that is traced once: `ScheduleFreeAdamW` begins with
    the weights.
    """
    compiled = getattr(model, "_compile_metrics", None)
    metric_lists = (
        [] if compiled is None else [compiled._user_metrics, compiled._user_weighted_metrics]
    )
    metrics = [m for m in keras.tree.flatten(metric_lists) if isinstance(m, keras.metrics.Metric)]
    return type(model.optimizer) in _PLAIN and all(
        type(metric).__module__.startswith("keras.") for metric in metrics
    )


@contextlib.contextmanager
def variables_made_outside() -> Iterator[None]:
    """Lift the creation of variables by metrics and optimizers out of a traced function.

    ``tf.function`` traces a function that creates a variable twice, which takes as long again.
    """
    wrap = functools.partial(_outside, kind=type(tf.Variable(0.0, trainable=False)))
    with contextlib.ExitStack() as stack:
        for base in (keras.metrics.Metric, keras.optimizers.Optimizer):
            owner = next(cls for cls in base.__mro__ if "add_variable" in vars(cls))
            stack.enter_context(replaced(owner, "add_variable", wrap))
        yield


def _outside(
    original: Callable[..., keras.Variable], *, kind: type[tf.Variable]
) -> Callable[..., keras.Variable]:
    def create(_: object, **settings: object) -> tf.Variable:
        return kind(**settings)  # the next creator is the function's, which takes note of it

    @functools.wraps(original)
    def add_variable(
        owner: object, shape: object, initializer: object = "zeros", *rest: object, **named: object
    ) -> keras.Variable:
        # A function of the user's own may compute with tensors of the step.
        if not isinstance(initializer, str | keras.initializers.Initializer):
            return original(owner, shape, initializer, *rest, **named)
        with tf.init_scope(), tf.variable_creator_scope(create):
            return original(owner, shape, initializer, *rest, **named)

    return add_variable


def _any_batch(tensor: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype)


def _control(requests: Sequence[bool]) -> tf.Tensor:
    return tf.constant([float(request) for request in requests])
