"""Messages between processes: what is written is read again, and nothing else is."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from typing import Any, get_args

import pytest

from horovod_spark_runner.cluster.protocol import messages
from horovod_spark_runner.cluster.protocol import messages as process_messages
from horovod_spark_runner.cluster.protocol.messages import (
    INSTRUCTIONS,
    JOIN_REPORTS,
    PREFORK_REQUESTS,
    WORKER_REPORTS,
    Alive,
    Assigned,
    Back,
    Begin,
    CallWanted,
    CannotJoin,
    Disconnected,
    DriverEvent,
    Dropped,
    Ended,
    Envelope,
    Exited,
    Failed,
    Finished,
    Forked,
    ForkWorker,
    Gather,
    Heartbeat,
    Hello,
    ImportModules,
    Leaving,
    Located,
    Log,
    Notice,
    Placed,
    Preempt,
    Progress,
    Refused,
    ResultFollows,
    Resumed,
    Stalled,
    StartDaemon,
    Started,
    Stop,
)
from horovod_spark_runner.cluster.protocol.outcome import RAISED, Failure
from horovod_spark_runner.cluster.protocol.topology import Node, Part, RankPlacement, SlotInfo
from horovod_spark_runner.cluster.slot.node_door import MpiIdentity
from horovod_spark_runner.typed_json import (
    Message,
    MessageError,
    parse,
    parse_plain,
    to_json,
)

INFO = SlotInfo(1, "h", "n", "10.0.0.1", 7000, "/t", ("/t/0", "/t/1"), (("0",), ()))
PLACEMENT = RankPlacement(3, 1, "h", local_rank=1, cross_rank=0, gpus=("0",), index=1)
NODE = Node("h", "h", "10.0.0.1", 7000, 0, (0, 1), ("/t/0", "/t/1"))
FAILURE = Failure(RAISED, 5.5, "ValueError: no", "ValueError", "Traceback", None, ("last", "words"))
# One of each kind that travels.
ALL: tuple[Message, ...] = (
    Started(),
    Finished(),
    Alive(),
    Resumed(10),
    Progress(0, 2, 5, 5, 15, {"loss": 0.25, "größe": math.inf}, 1000.0),
    Progress(0, 2, 4, 5, 14, {}),
    Notice("the rate is kept", warn=True),
    Hello(),
    Located(INFO),
    CannotJoin(1, "its disk is full"),
    Placed(2, "h: ranks 0, 1 (CPU)"),
    Back(),
    Heartbeat(),
    Leaving("SIGTERM"),
    Failed.of(FAILURE),
    Log(("one", "", "\udc80 zwei\0")),
    Dropped(1200),
    CallWanted(),
    ResultFollows(2**40),
    Ended(),
    Assigned(Part(1, 4, 2, (PLACEMENT,), (NODE,), "/t")),
    Refused("slot 1 cannot take part"),
    Gather(),
    Stalled("no rank gets on"),
    Preempt(),
    Stop("ended by the driver"),
    StartDaemon(("--x", "1")),
    Begin({"PMIX_RANK": "3"}, 3, 4),
    Forked(77, 650_000_000),
    Exited(-9),
    ImportModules(("tensorflow",), 0.0),
    ForkWorker("/t/rank-0", "/t/payload", {"TMPDIR": "/t"}, (), 60.0),
    Envelope(1, -1, "h", Hello()),
)
KINDS = {
    kind
    for module in (messages, process_messages)
    for kind in vars(module).values()
    if inspect.isclass(kind)
}
TRAVELLING = {kind for kind in KINDS if issubclass(kind, Message)} - {Message}


def test_the_list_is_complete() -> None:
    assert {type(message) for message in ALL} == TRAVELLING
    assert len({kind.__name__ for kind in TRAVELLING}) == len(TRAVELLING)


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_what_is_written_is_read_again(message: Message) -> None:
    assert parse(to_json(message), type(message)) == message
    assert parse(to_json(message).encode(), *sorted(TRAVELLING, key=str)) == message


@pytest.mark.parametrize("kind", sorted(TRAVELLING, key=str), ids=lambda kind: kind.__name__)
def test_kinds_are_values(kind: Any) -> None:
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[union-attr]
    assert not hasattr(next(m for m in ALL if type(m) is kind), "__dict__")


def test_an_envelope_holds_what_ranks_and_slots_say() -> None:
    reports = get_args(messages.RankReport) + get_args(messages.SlotReport)
    for message in ALL:
        text = to_json(Envelope(1, 3, "h", message))  # type: ignore[arg-type]
        if isinstance(message, reports):
            assert parse(text, Envelope).message == message
        else:
            with pytest.raises(MessageError, match=f"'{type(message).__name__}'"):
                parse(text, Envelope)


@pytest.mark.parametrize("kind", get_args(DriverEvent))
def test_what_the_driver_finds_out_nobody_can_tell_it(kind: type) -> None:
    text = '{"kind":"Envelope","slot":1,"rank":1,"host":"h","message":{"kind":"%s","time":1.0}}'
    with pytest.raises(MessageError, match=f"'{kind.__name__}'"):
        parse(text % kind.__name__, Envelope)
    assert '"kind":"Disconnected"' not in to_json(Envelope(1, 1, "h", Disconnected(1.0)))


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        (INSTRUCTIONS, {Assigned, Refused, Gather, Stalled, Preempt, Stop}),
        (JOIN_REPORTS, {Located, CannotJoin}),
        (PREFORK_REQUESTS, {ImportModules, ForkWorker}),
        (
            WORKER_REPORTS,
            {Started, Finished, Alive, Resumed, Progress, Notice, Forked, Exited},
        ),
    ],
)
def test_each_party_takes_what_is_for_it(
    kinds: tuple[type[Message], ...], wanted: set[type]
) -> None:
    assert set(kinds) == wanted
    for message in ALL:
        if type(message) in wanted:
            assert parse(to_json(message), *kinds) == message
        else:
            with pytest.raises(MessageError, match=type(message).__name__):
                parse(to_json(message), *kinds)


def changed(message: Message, /, **fields: Any) -> str:
    return json.dumps({**json.loads(to_json(message)), **fields})


PROGRESS = Progress(0, 2, 5, 5, 15, {"loss": 0.25})


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "JSON"),
        ("{", "JSON"),
        ("[]", r"object.*\[\]"),
        ("{}", "None"),
        ('{"kind":["Stop"]}', r"\['Stop'\]"),
        ('{"kind":"stop","reason":"x"}', "'stop'.*Stop"),
        ('{"kind":"Stop"}', r"Stop.*\breason\W*$"),
        (changed(Stop("x"), slot=1), r"Stop.*\bslot\W*$"),
        (changed(Stop("x"), reason=1), r"Stop.reason.*\b1"),
        (changed(Stop("x"), reason=None), "Stop.reason.*None"),
        (changed(Resumed(1), run_step=True), "Resumed.run_step.*True"),
        (changed(Resumed(1), run_step=1.5), "Resumed.run_step.*1.5"),
        (changed(Notice("x", True), warn=1), r"Notice.warn.*\b1"),
        (changed(Log(()), lines="text"), "Log.lines.*'text'"),
        (changed(Log(()), lines=["a", 1]), r"Log.lines.*\b1"),
        (changed(PROGRESS, metrics=[]), r"Progress.metrics.*\[\]"),
        (changed(PROGRESS, metrics={"loss": "0.5"}), "Progress.metrics.*'0"),
        (
            changed(PROGRESS, metrics={"loss": True}),
            "Progress.metrics.*True",
        ),
        (changed(PROGRESS, samples_per_second="many"), "samples_per_second"),
        (changed(PROGRESS, samples_per_second=10**400), "1000 bits"),
        (changed(Located(INFO), info=None), "Located.info.*None"),
        (
            changed(Located(INFO), info={"slot": 1}),
            r"Located.info.*SlotInfo(?!\.)",
        ),
        (
            changed(Located(INFO), info={**dataclasses.asdict(INFO), "gpus": ["01"]}),
            "Located.info.*SlotInfo.gpus.*'01'",
        ),
        (
            changed(Envelope(1, 1, "h", Hello()), message={"kind": "Log", "lines": None}),
            "Envelope.message.*Log.lines.*None",
        ),
    ],
)
def test_what_is_wrong_is_named(text: str, error: str) -> None:
    with pytest.raises(MessageError, match=error):
        parse(text, *sorted(TRAVELLING, key=str))


def test_an_error_is_short_however_long_the_message_is() -> None:
    for text in (
        changed(Stop("x"), reason=["long"] * 10_000),
        changed(Stop("x"), **{f"field-{number}": 0 for number in range(10_000)}),
        json.dumps({"kind": "long" * 10_000}),
    ):
        with pytest.raises(MessageError) as caught:
            parse(text, Stop)
        assert len(str(caught.value)) < 400


def test_whole_numbers_are_numbers() -> None:
    read = parse(changed(PROGRESS, metrics={"loss": 1}), Progress)
    assert read.metrics == {"loss": 1.0}
    assert isinstance(read.metrics["loss"], float)


def test_a_failure_travels_without_its_pickled_exception() -> None:
    failed = Failed.of(dataclasses.replace(FAILURE, exception=b"pickled"))
    assert parse(to_json(failed), Failed).failure() == FAILURE


def test_what_json_does_not_have_is_not_sent() -> None:
    with pytest.raises(TypeError, match="bytes.*JSON"):
        to_json(Stop(b"x"))  # type: ignore[arg-type]


def test_shims_send_their_fields_alone() -> None:
    identity = MpiIdentity({"PMIX_RANK": "7"})
    assert parse_plain(to_json(identity), MpiIdentity) == identity
    with pytest.raises(MessageError, match=r"MpiIdentity.environment.*\b7"):
        parse_plain('{"environment":{"PMIX_RANK":7}}', MpiIdentity)


@dataclasses.dataclass(frozen=True)
class Either:
    value: set[int]


def test_a_type_that_cannot_be_read_is_named() -> None:
    with pytest.raises(TypeError, match=r"set\[int\].*JSON"):
        parse_plain('{"value":1}', Either)
