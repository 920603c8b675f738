"""Settings of a run: frozen values, checked when they are made."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

from .errors import InvalidInputError

ALLREDUCE_ALGORITHMS = ("auto", "ring", "segmented_ring", "recursive_doubling")
COMPRESSIONS = ("none", "fp16")
LR_SCALINGS = ("none", "linear", "sqrt")
MATERIALIZERS = ("petastorm", "spark")
MIN_HEARTBEAT_TIMEOUT = 15.0
RESUMES = ("auto", "never", "required")
BEST_MODES = ("min", "max")
ON_CHECKPOINT_ERROR = ("raise", "warn")


def check_count(name: str, value: object, minimum: int = 1) -> int:
    """Return ``value``, which may be NumPy's, as a whole number of at least ``minimum``.

    Raises:
        InvalidInputError: it is not.
    """
    number = whole_number(value)
    if number is None or number < minimum:
        raise InvalidInputError(
            f"{name} must be a whole number of at least {minimum}, got {value!r}"
        )
    return number


def whole_number(value: object) -> int | None:
    """Return ``value`` as an integer; ``None`` if it is of another kind."""
    # bool is an int to Python, and NumPy's to older NumPys, but num_workers=True is a mistake.
    if type(value).__name__ in ("bool", "bool_") or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError:  # an array of several
        return None


def check_number(name: str, value: object, *, unit: str = "") -> float:
    """Return ``value``, which may be NumPy's, as a finite number of at least 0.

    Args:
        name: what it is, for the message.
        value: the number.
        unit: what it counts, for the message.

    Raises:
        InvalidInputError: it is not.
    """
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else -1.0
    if not math.isfinite(number) or number < 0:
        kind = f"a number of {unit}" if unit else "a number"
        raise InvalidInputError(f"{name} must be {kind}, at least 0, got {value!r}")
    return number


def check_seconds(name: str, value: object) -> float:
    """Return ``value`` in seconds if it is a finite number of at least 0, else raise."""
    return check_number(name, value, unit="seconds")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of ``choices``, else raise ``InvalidInputError``."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidInputError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value


def check_flag(name: str, value: object) -> bool:
    """Return ``value``, which may be NumPy's, as a boolean.

    Raises:
        InvalidInputError: it is something else, such as ``"no"``, which Python takes for true.
    """
    if not isinstance(value, bool) and type(value).__name__ not in ("bool_", "bool"):
        raise InvalidInputError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def _set(settings: object, name: str, value: object) -> None:
    """Give a field of frozen ``settings``, while they are made, its checked value."""
    object.__setattr__(settings, name, value)


@dataclass(frozen=True)
class AllreduceOptions:
    """How gradients are added up over the ranks.

    Attributes:
        algorithm: Open MPI's allreduce. ``"auto"`` (default) leaves the choice to Open MPI, which
            takes recursive doubling for small messages and ring or segmented ring for large
            ones: a ring moves the least data (2·(N−1)/N of the message per rank) but needs
            2·(N−1) messages one after the other, so forcing it slows small models down.
            ``"ring"`` and ``"segmented_ring"`` force it for every size.
        segment_bytes: segment size of ``"segmented_ring"``, in bytes; 0 leaves Open MPI's own.
        compression: ``"fp16"`` halves what is sent of float32 gradients; ``"none"`` (default).
        fusion_bytes: Horovod's fusion buffer, in bytes (64 MiB).
        cycle_ms: how long Horovod waits for further tensors, in milliseconds (1).

    Raises:
        InvalidInputError: one of them cannot be.
    """

    algorithm: str = "auto"
    segment_bytes: int = 0
    compression: str = "none"
    fusion_bytes: int = 64 * 1024 * 1024
    cycle_ms: float = 1.0

    def __post_init__(self) -> None:
        check_choice("allreduce algorithm", self.algorithm, ALLREDUCE_ALGORITHMS)
        check_choice("allreduce compression", self.compression, COMPRESSIONS)
        for name in ("segment_bytes", "fusion_bytes"):
            _set(self, name, check_count(f"allreduce {name}", getattr(self, name), minimum=0))
        if self.segment_bytes and self.algorithm != "segmented_ring":
            raise InvalidInputError(
                f"segment_bytes={self.segment_bytes} applies to algorithm='segmented_ring' only, "
                f"got algorithm={self.algorithm!r}"
            )
        _set(self, "cycle_ms", check_number("allreduce cycle_ms", self.cycle_ms))
        if not self.cycle_ms:
            raise InvalidInputError(f"allreduce cycle_ms must be above 0, got {self.cycle_ms!r}")


@dataclass(frozen=True)
class LaunchOptions:
    """How ranks are started and watched.

    Attributes:
        num_workers: ranks.
        gpus_per_worker: GPUs of each rank, as Spark schedules them; 0 for CPU.
        resources: what a task of the training asks of Spark in place of the session's settings:
            amounts by name (``{"cpus": 4, "gpu": 1}``) or a Spark ``ResourceProfile``.
        share_gpus: allow several ranks on one device.
        start_timeout: seconds to wait for free slots. ``None`` (default): only as long as the
            executors of a new session take to register (10), and as Spark takes to start the
            tasks once there are enough (60).
        stall_timeout: seconds without any progress of any rank after which the run is ended, with
            the Python stacks of all ranks in the error; ``None`` (default) for never. Steps of a
            training are progress, and what a function tells with `report_progress`.
        heartbeat_timeout: seconds without a sign of life of a connected slot after which its
            host counts as lost (30).
        worker_idle_timeout: seconds for which a process that has imported the framework stays on
            each executor, so that the ranks of the next run need not (60); 0 keeps none.
        network_interface: interface the ranks talk over: its name, its address, or a network
            such as ``10.0.0.0/8``; by default, that of the route to the other hosts.
        allow_unencrypted: run across hosts although Spark is set to encrypt its own traffic:
            MPI's is not encrypted.
        env: environment variables set for every rank, over its executor's.
        mpi_parameters: further Open MPI parameters, as ``--mca NAME VALUE``.
        allreduce: see `AllreduceOptions`.
        stream_logs: print progress and the ranks' output lines on the driver; warnings are
            logged in any case.
        log_dir: folder or URL for the full log of each rank; ``None`` to keep none.
    """

    num_workers: int
    gpus_per_worker: int = 0
    resources: Any = None
    share_gpus: bool = False
    start_timeout: float | None = None
    stall_timeout: float | None = None
    heartbeat_timeout: float = 30.0
    worker_idle_timeout: float = 60.0
    network_interface: str | None = None
    allow_unencrypted: bool = False
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    mpi_parameters: Mapping[str, str] = field(default_factory=dict)
    allreduce: AllreduceOptions = AllreduceOptions()
    stream_logs: bool = True
    log_dir: str | None = None

    def __post_init__(self) -> None:
        _set(self, "num_workers", check_count("num_workers", self.num_workers))
        gpus = check_count("gpus_per_worker", self.gpus_per_worker, minimum=0)
        _set(self, "gpus_per_worker", gpus)
        for name in ("start_timeout", "stall_timeout", "heartbeat_timeout", "worker_idle_timeout"):
            if getattr(self, name) is not None:
                _set(self, name, check_seconds(name, getattr(self, name)))
        # Slots show themselves every 5 seconds; less than three times that ends healthy runs.
        if self.heartbeat_timeout < MIN_HEARTBEAT_TIMEOUT:
            raise InvalidInputError(
                f"heartbeat_timeout must be at least {MIN_HEARTBEAT_TIMEOUT:g} seconds, got "
                f"{self.heartbeat_timeout!r}"
            )
        if self.network_interface is not None and not self.network_interface:
            raise InvalidInputError("network_interface must name an interface, got ''")
        if isinstance(self.resources, Mapping):
            check_resources(self.resources)
            plain = {
                name: float(amount) if whole_number(amount) is None else int(amount)
                for name, amount in self.resources.items()
            }
            _set(self, "resources", plain)
        for name, mapping in (("env", self.env), ("mpi_parameters", self.mpi_parameters)):
            wrong = [
                k for k, v in mapping.items() if not isinstance(k, str) or not isinstance(v, str)
            ]
            if wrong:  # the values may be secrets: only names and types are shown
                kinds = ", ".join(f"{key!r}: {type(mapping[key]).__name__}" for key in wrong)
                raise InvalidInputError(f"{name} must map text to text, got {{{kinds}}}")
            _set(self, name, MappingProxyType(dict(mapping)))

    def __reduce__(self) -> tuple[object, ...]:
        # A mapping proxy does not pickle; the settings travel to the workers, where the
        # resources, perhaps a handle on Spark's JVM, mean nothing any more.
        values = {name.name: getattr(self, name.name) for name in fields(self)}
        values.update(env=dict(self.env), mpi_parameters=dict(self.mpi_parameters), resources=None)
        return partial(LaunchOptions, **values), ()


def check_resources(resources: Mapping[str, float]) -> None:
    """Check that ``resources`` maps names to amounts a task can ask for.

    Raises:
        InvalidInputError: it does not.
    """
    for name, amount in resources.items():
        number = isinstance(amount, Real) and not isinstance(amount, bool)
        if not isinstance(name, str) or not number or amount <= 0:
            raise InvalidInputError(
                "resources must map names to amounts above 0, such as {'cpus': 4, 'gpu': 1}, got "
                f"{dict(resources)!r}"
            )


@dataclass(frozen=True)
class FitOptions:
    """How a model is fitted.

    Attributes:
        batch_size: rows per rank and step; a global batch holds ``num_workers`` times as many.
        epochs: epochs the run is to have in the end, those of earlier, resumed runs included.
        seed: seed of the shuffle, of weight initialisation and of the frameworks.
        shuffle: take the rows in another order every epoch.
        lr_scaling: multiply the learning rate by the number of ranks (``"linear"``), its square
            root (``"sqrt"``) or not at all (``"none"``).
        warmup_epochs: epochs over which the learning rate rises to its scaled value.
        window_bytes: memory of the shuffle window of one rank, in bytes; rows that take no more
            than this in all are read from storage only once.
        steps_per_epoch: steps of an epoch, which goes on in the data where the last one ended;
            ``None`` for all rows once.
        validation_freq: validate after every so many epochs, or after those of these numbers,
            counted from 1.
        class_weight: what each class (a whole number) counts for in the loss; 1 where not given.
    """

    batch_size: int = 32
    epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    lr_scaling: str = "none"
    warmup_epochs: float = 0.0
    window_bytes: int = 256 * 1024 * 1024
    steps_per_epoch: int | None = None
    validation_freq: int | Sequence[int] = 1
    class_weight: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "window_bytes"):
            _set(self, name, check_count(name, getattr(self, name)))
        _set(self, "seed", check_count("seed", self.seed, minimum=0))
        _set(self, "shuffle", check_flag("shuffle", self.shuffle))
        if self.steps_per_epoch is not None:
            _set(self, "steps_per_epoch", check_count("steps_per_epoch", self.steps_per_epoch))
        if isinstance(self.validation_freq, (list, tuple)):
            chosen = tuple(check_count("validation_freq", n) for n in self.validation_freq)
            _set(self, "validation_freq", chosen)
        else:
            _set(self, "validation_freq", check_count("validation_freq", self.validation_freq))
        if self.class_weight is not None:
            _set(self, "class_weight", check_class_weight(self.class_weight))
        if self.seed >= 2**32:
            raise InvalidInputError(f"seed must be below 2**32, got {self.seed}")
        check_choice("lr_scaling", self.lr_scaling, LR_SCALINGS)
        _set(self, "warmup_epochs", check_number("warmup_epochs", self.warmup_epochs))
        if self.warmup_epochs and self.lr_scaling == "none":
            raise InvalidInputError(
                f"warmup_epochs={self.warmup_epochs} needs lr_scaling='linear' or 'sqrt': the "
                "warm-up rises from the model's learning rate to the scaled one"
            )

    def validates(self, epoch: int) -> bool:
        """Tell whether the epoch of this number, from 0, is followed by a validation."""
        if isinstance(self.validation_freq, int):
            return (epoch + 1) % self.validation_freq == 0
        return epoch + 1 in self.validation_freq


def check_class_weight(weights: object) -> dict[int, float]:
    """Return ``weights`` if it maps classes to what they count for.

    Raises:
        InvalidInputError: it does not.
    """
    if not isinstance(weights, Mapping) or not all(
        isinstance(label, Integral)
        and isinstance(weight, Real)
        and math.isfinite(weight)
        and float(weight) >= 0
        for label, weight in weights.items()
    ):
        raise InvalidInputError(
            "class_weight must map classes (whole numbers) to weights of at least 0, such as "
            f"{{0: 1.0, 1: 5.0}}, got {weights!r}"
        )
    return {int(label): float(weight) for label, weight in weights.items()}


@dataclass(frozen=True)
class CheckpointOptions:
    """When checkpoints are taken besides every epoch's end, and which are kept.

    Attributes:
        every_steps: also after every so many steps of the whole run; ``None`` for never.
        every_minutes: also whenever so many minutes have passed; ``None`` for never.
        keep: how many to keep, the newest.
        best_metric: keep the one with the best value of this metric too, such as ``"val_loss"``.
        best_mode: whether ``"min"`` or ``"max"`` is best.
        on_error: what a checkpoint that cannot be written does to the training: ``"raise"`` ends
            it, ``"warn"`` goes on to the next.
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    keep: int = 3
    best_metric: str | None = None
    best_mode: str = "min"
    on_error: str = "raise"

    def __post_init__(self) -> None:
        if self.every_steps is not None:
            _set(self, "every_steps", check_count("checkpoint_every_steps", self.every_steps))
        if self.every_minutes is not None:
            minutes = check_number("checkpoint_every_minutes", self.every_minutes, unit="minutes")
            if not minutes:
                raise InvalidInputError(
                    f"checkpoint_every_minutes must be above 0, got {self.every_minutes!r}"
                )
            _set(self, "every_minutes", minutes)
        _set(self, "keep", check_count("keep_checkpoints", self.keep))
        check_choice("best_mode", self.best_mode, BEST_MODES)
        check_choice("on_checkpoint_error", self.on_error, ON_CHECKPOINT_ERROR)
        if self.best_metric is not None and not isinstance(self.best_metric, str):
            raise InvalidInputError(
                f"best_metric must be the name of a metric, got {self.best_metric!r}"
            )

    @property
    def best_is_highest(self) -> bool:
        return self.best_mode == "max"


@dataclass(frozen=True)
class RestartOptions:
    """What is done when a run is cut short by something other than its own code.

    Attributes:
        max_restarts: how often it is started again from its newest checkpoint.
        min_workers: ranks a restart may make do with where Spark has no slots for all;
            ``None`` for all.
        backoff_seconds: pause before the first restart; doubled each time without progress.
    """

    max_restarts: int = 0
    min_workers: int | None = None
    backoff_seconds: float = 0.5

    def __post_init__(self) -> None:
        _set(self, "max_restarts", check_count("max_restarts", self.max_restarts, minimum=0))
        if self.min_workers is not None:
            _set(self, "min_workers", check_count("min_workers", self.min_workers))
        _set(self, "backoff_seconds", check_seconds("restart_backoff", self.backoff_seconds))


def check_workers(launching: LaunchOptions, restarts: RestartOptions) -> None:
    """Check that a restart does not need more ranks than the run.

    Raises:
        InvalidInputError: it does.
    """
    least = restarts.min_workers
    if least is not None and least > launching.num_workers:
        raise InvalidInputError(
            f"min_workers={least} is more than num_workers={launching.num_workers}"
        )
