"""Training and validation steps of this rank, as a part of the world's, compiled by TensorFlow.

While a step runs, the ``apply`` of Keras's optimizers first hands the gradients to the synchroniser
(allreduce adds those of all ranks up), inside the compiled step, and then continues as before:
clipping, loss scaling, gradient accumulation and moving averages see the reduced gradients, as in a
single process. It does so for every optimizer that the step uses, wherever the model keeps it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from ...errors import ModelError
from ...sync.synchroniser import Synchroniser
from ...training.epochs import NOTHING
from ...training.progress import Logs
from .exchange import (
    Part,
    Scope,
    Stopwatch,
    in_condition,
    runner_variable,
)
from .losses import alone, parts_of_a_whole
from .metrics import StepMetrics
from .model import Nest, all_layers, classes_with, has_custom_steps, replaced
from .optimizers import find_optimizers

# A step's logs, and how many ranks made each request; ``None`` where ranks do not meet in it.
_StepResult = tuple[Logs | None, tf.Tensor | None]
_Train = Callable[[Nest, tf.Tensor], _StepResult]


class DistributedStep:
    """Runs the steps of a model as part of the world.

    Args:
        model: a compiled model.
        synchroniser: reduces gradients.
        share_logs: whether the logs of each step are to be those of all ranks.
    """

    def __init__(
        self, model: keras.Model, synchroniser: Synchroniser, *, share_logs: bool = False
    ) -> None:
        self._model = model
        self._synchroniser = synchroniser
        self._custom_steps = has_custom_steps(model)
        self._logs_wanted = runner_variable(share_logs)
        self._logs_wanted_now = share_logs
        self.share_logs = share_logs
        # The model's optimizers, and after them those that only its step was seen to use. Where
        # optimizers alternate, a resumed run may see another one first than it had.
        self.optimizers = find_optimizers(model)
        # How often each of them was, within a step, by its number.
        self._applications: dict[int, int] = {}
        # The names of what its steps log, before nested logs are taken apart.
        self.logged: dict[str, set[str]] = {}
        self.scope = Scope()
        self.stopwatch = Stopwatch()
        self._part = Part(1)
        # A variable, not an argument: a function within the step may be traced only once.
        self._fraction = runner_variable(1.0 / hvd.size(), tf.float64)
        self._fraction_now = 1.0 / hvd.size()
        self._control: tf.Tensor | None = None
        self._reduced: tf.Tensor | None = None
        self._inside = False
        # Gradients of a step that is tried, by optimizer and weight.
        self._tried: dict[str, tf.Tensor] | None = None
        self._refusal: ModelError | None = None

    @functools.cached_property
    def size(self) -> int:
        """The number of ranks."""
        return int(hvd.size())

    def set_fraction(self, fraction: float) -> None:
        """Set this rank's fraction of the global batch's rows for the next step."""
        if fraction != self._fraction_now:
            self._fraction.assign(fraction)
            self._fraction_now = fraction

    def want_logs(self, wanted: bool) -> None:
        """Set whether the next step's logs are used; the same on all ranks."""
        wanted = wanted or self.share_logs
        if wanted != self._logs_wanted_now:
            self._logs_wanted.assign(wanted)
            self._logs_wanted_now = wanted

    def step(self, data: Nest, control: tf.Tensor) -> _StepResult:
        """Run the model's ``train_step`` as part of the world; may be traced.

        Args:
            data: what ``train_step`` takes.
            control: float32 vector of what this rank asks of all: 1 for each request and 0 else.

        Returns:
            The step's logs, and how many ranks made each request; ``None`` where ranks do not meet
            in every step.
        """
        return self._step(data, control, Part(hvd.size(), self._fraction))

    def equal_step(self, data: Nest, control: tf.Tensor) -> _StepResult:
        """Run a `step` in which every rank has the same number of rows."""
        return self._step(data, control, Part(hvd.size()))

    def test_step(self, data: Nest) -> Logs | None:
        """Run the model's ``test_step`` as part of the world; may be traced."""
        part = Part(hvd.size(), self._fraction)
        self.scope.enter()
        metrics = StepMetrics(self._model, part)
        with parts_of_a_whole(part, self.scope), self._custom_step_logs(metrics):
            logs = self._model.test_step(data)
        self.logged["test"] = set(logs) if isinstance(logs, Mapping) else set()
        return metrics.finish(logs, share=self.share_logs)

    def try_step(
        self, data: Nest, fraction: float, sums: dict[str, list[tf.Tensor]]
    ) -> dict[str, tf.Tensor]:
        """Run the model's ``train_step`` on this rank alone, and apply no gradients.

        Args:
            data: what ``train_step`` takes.
            fraction: which part of a global batch it is.
            sums: those over the rows of the global batch, of an earlier call, or empty; see `Part`.

        Returns:
            What optimizers are given, by optimizer and weight.
        """
        part = Part(2, tf.constant(fraction, tf.float64), sums)
        self._tried, self._applications = {}, {}
        eager = tf.config.functions_run_eagerly()
        # Nothing that is traced here may stay in a function that real steps use.
        tf.config.run_functions_eagerly(True)
        self.scope.enter()
        try:
            with parts_of_a_whole(part, self.scope), self._reducing_optimizers():
                self._train_step(data)
            return self._tried
        finally:
            self._tried = None
            tf.config.run_functions_eagerly(eager)

    def _step(self, data: Nest, control: tf.Tensor, part: Part) -> _StepResult:
        together = self._synchroniser.meets_in_every_step
        # Between meetings, a rank's step is that of a process of its own.
        self._part, self._control = part if together else Part(1), control
        in_step = self._synchroniser.in_step
        self._reduced = None
        self._applications = {}
        self.scope.enter()
        metrics = StepMetrics(self._model, part)
        statistics = _Statistics(self._model, self._part, self._synchroniser)
        with (
            parts_of_a_whole(self._part, self.scope),
            self._reducing_optimizers(),
            self._custom_step_logs(metrics) if in_step else contextlib.nullcontext(),
        ):
            logs = self._train_step(data)
        if self._reduced is None and together:
            # No gradients were applied, or in a graph of their own, whose tensors stay there.
            self._reduced = self._part.sum([control], "control")[0]
        statistics.average()
        self.logged["train"] = set(logs) if isinstance(logs, Mapping) else set()
        return metrics.finish(logs, share=self.share_logs and in_step), self._reduced

    def _custom_step_logs(self, metrics: StepMetrics) -> contextlib.AbstractContextManager[None]:
        """Merge the logs of a custom step over all ranks where they are used."""
        if hvd.size() == 1 or not self._custom_steps:
            return contextlib.nullcontext()
        return metrics.results_of_all(self.scope, self._logs_wanted)

    def _train_step(self, data: Nest) -> Logs | None:
        self._refusal = None
        try:
            logs: Logs | None = self._model.train_step(data)
        except Exception:
            if self._refusal is not None:  # AutoGraph makes another exception of it
                raise self._refusal from None
            raise
        return logs

    def reduce(self, gradients: Sequence[tf.Tensor | None], place: str) -> list[tf.Tensor | None]:
        """Return the gradients of the global batch; ``None`` entries stay.

        Args:
            gradients: this rank's, dense.
            place: what they are for; see `Synchroniser.gradients`.
        """
        # What the ranks ask of each other goes along, where its sum can be used outside.
        along = [self._control] if self.scope.outermost else []
        start = self.stopwatch.begin(gradients)
        reduced, summed = self._synchroniser.gradients(
            gradients, self._part, self.scope.name("gradients"), place, along
        )
        self.stopwatch.end(start, [*reduced, *summed])
        if summed:
            self._reduced = summed[0]
        return reduced

    @contextlib.contextmanager
    def _reducing_optimizers(self) -> Iterator[None]:
        """Make all optimizers reduce gradients before they apply them."""
        with contextlib.ExitStack() as stack:
            for cls in classes_with(keras.optimizers.Optimizer, "apply"):
                stack.enter_context(replaced(cls, "apply", self._reducing))
            yield

    def _reducing(self, original: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(original)
        def apply(
            optimizer: keras.optimizers.Optimizer,
            grads: Sequence[tf.Tensor],
            trainable_variables: Iterable[keras.Variable] | None = None,
        ) -> object:
            if self._inside:  # an optimizer that wraps others, or calls its base class
                return original(optimizer, grads, trainable_variables)
            if trainable_variables is not None:
                trainable_variables = list(trainable_variables)
            self._inside = True
            try:
                variables = trainable_variables or optimizer._trainable_variables
                dense = _dense(grads, variables)
                if self._tried is not None:
                    place = self._place_of(optimizer)
                    for variable, one in zip(variables, dense, strict=False):
                        if one is not None:
                            self._tried[f"{place} {variable.path}"] = one
                    return None
                self._check_applied(optimizer)
                reduced = self.reduce(dense, self._place_of(optimizer))
                with alone():
                    return original(optimizer, reduced, trainable_variables)
            finally:
                self._inside = False

        return apply

    def _place_of(self, optimizer: keras.optimizers.Optimizer) -> str:
        """Return a name for an optimizer's current application within the step."""
        number = next(
            (n for n, o in enumerate(self.optimizers) if o is optimizer), len(self.optimizers)
        )
        if number == len(self.optimizers):
            self.optimizers.append(optimizer)
        time = self._applications[number] = self._applications.get(number, -1) + 1
        return f"{number}.{time}"

    def _check_applied(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Check that all ranks apply gradients here, as they come from the step.

        Raises:
            ModelError: a tensor decides, by which ranks could part; or the optimizer's own
                ``apply_gradients`` has seen this rank's alone.
        """
        if self._part.size == 1:
            return
        if in_condition(self.scope):
            self._refuse(
                f"the train_step of model {self._model.name!r} applies gradients inside a "
                "condition or loop on a tensor: ranks could decide differently and wait for "
                "each other for ever. Apply them in every step (multiply them by 0 where they "
                "are not to count), and repeat steps with Python's range"
            )
        kind, method = type(optimizer), "apply_gradients"
        if getattr(kind, method) is not getattr(keras.optimizers.Optimizer, method):
            self._refuse(
                f"optimizer {optimizer.name!r} ({kind.__name__}) overrides {method}(), which sees "
                "the gradients of its own rank's rows; override apply(grads, trainable_variables), "
                "which sees those of all ranks, or train with num_workers=1"
            )

    def _refuse(self, text: str) -> NoReturn:
        self._refusal = ModelError(text)
        raise self._refusal


def _dense(
    gradients: Iterable[tf.Tensor | None], variables: Sequence[keras.Variable]
) -> list[tf.Tensor | None]:
    """Return gradients as dense tensors of static shape.

    That of a gradient of rows of a table, or of what the user's own operations make, may be known
    in the step only; what it is for has one.
    """
    listed = list(gradients)
    if listed and len(listed) != len(variables):
        raise ModelError(
            f"an optimizer is given {len(listed)} gradients for {len(variables)} variables; give "
            "apply() one for each, and the variables as well where it is not built"
        )
    return [_shaped(one, variable) for one, variable in zip(listed, variables, strict=False)]


def _shaped(gradient: tf.Tensor | None, variable: keras.Variable) -> tf.Tensor | None:
    # Another operation would make TensorFlow fuse, and round, otherwise than in plain Keras.
    static = isinstance(gradient, tf.Tensor) and gradient.shape.is_fully_defined()
    if gradient is None or static:
        return gradient
    return tf.ensure_shape(tf.convert_to_tensor(gradient), variable.shape)


class _Statistics:
    """Averages state that training changes besides weights, such as moments of batches.

    Their changes are averaged, not their values: what did not change stays as it is, to the bit.

    Args:
        model: the model, before a step.
        part: this rank's part of the step.
        synchroniser: reduces the changes.
    """

    def __init__(self, model: keras.Model, part: Part, synchroniser: Synchroniser) -> None:
        self._part = part
        self._synchroniser = synchroniser
        self._variables = _changing_statistics(model) if part.size > 1 else []
        self._before = [tf.identity(tf.convert_to_tensor(v)) for v in self._variables]

    def average(self) -> None:
        if not self._variables:
            return
        # Infinity less infinity would be no number.
        bases = [tf.where(tf.math.is_finite(b), b, tf.zeros_like(b)) for b in self._before]
        local_changes = [
            tf.convert_to_tensor(variable) - base
            for variable, base in zip(self._variables, bases, strict=True)
        ]
        changes = self._synchroniser.changes(local_changes, self._part, "statistics")
        for variable, base, change in zip(self._variables, bases, changes, strict=True):
            variable.assign(base + change)


def _changing_statistics(model: keras.Model) -> list[keras.Variable]:
    """Return the float variables that layers change while they are trained.

    Those of frozen layers do not change and need not be sent.
    """
    statistics: dict[int, keras.Variable] = {}
    for layer in all_layers(model):
        if layer.trainable:
            for variable in layer._non_trainable_variables:
                if tf.as_dtype(variable.dtype).is_floating:
                    statistics[id(variable)] = variable
    return list(statistics.values())


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

    Attributes:
        graph: of a training step; ``None`` where it is not compiled.
    """

    def __init__(
        self,
        exchange: DistributedStep,
        data: Nest,
        test_data: Nest,
        *,
        eager: bool,
        custom: bool,
    ) -> None:
        self._exchange = exchange
        self._eager = eager
        self._custom = custom
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

    def train_full(self, data: Nest, requests: Sequence[bool]) -> _StepResult:
        """Run a step where every rank has a full batch.

        Args:
            data: what ``train_step`` takes.
            requests: what this rank asks of all; see `Agreement`.

        Returns:
            The step's logs, and how many ranks made each request; ``None`` where ranks do not meet
            in every step.
        """
        control = _control(requests) if any(requests) else self._no_requests
        if self._train_full is None:
            return self.train(data, 1.0 / self._exchange.size, requests)
        return self._train_full(data, control)

    def train(self, data: Nest, fraction: float, requests: Sequence[bool]) -> _StepResult:
        """Run a step where this rank has ``fraction`` of the rows of all."""
        self._exchange.set_fraction(fraction)
        return self._train(data, _control(requests))

    def test(self, data: Nest, fraction: float) -> Logs | None:
        """Run a test step where this rank has ``fraction`` of the rows of all."""
        self._exchange.set_fraction(fraction)
        return self._test(data)


def _any_batch(tensor: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype)


def _control(requests: Sequence[bool]) -> tf.Tensor:
    return tf.constant([float(request) for request in requests])
