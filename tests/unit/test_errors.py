"""The exception tree."""

from __future__ import annotations

import inspect
import pickle

import pytest

from horovod_spark_runner import errors
from horovod_spark_runner.errors import (
    HorovodSparkError,
    InvalidInputError,
    NotEnoughSlotsError,
    RankFailedError,
    StalledError,
    on_one_line,
    one_line,
)

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, HorovodSparkError)
]


def make(cls: type[HorovodSparkError]) -> HorovodSparkError:
    if cls is NotEnoughSlotsError:
        return NotEnoughSlotsError("few", requested=8, available=4)
    if cls is RankFailedError:
        return RankFailedError(
            "bad", rank=3, host="h", exception_type="KeyError", remote_traceback="Traceback"
        )
    if cls is StalledError:
        return StalledError("hangs", stacks={0: "File ..."})
    return cls("message")


@pytest.mark.parametrize("cls", CLASSES)
def test_every_exception_pickles_with_its_fields(cls: type[HorovodSparkError]) -> None:
    error = make(cls)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_the_drawn_tree_names_every_exception(cls: type[HorovodSparkError]) -> None:
    assert cls.__name__ in (errors.__doc__ or "")


def test_what_others_say_is_told_on_one_line_without_colours() -> None:
    text = on_one_line(ValueError("\x1b[96mThis is step 2/3\x1b[0m\n\nof \x1b[1;31mthree"))
    assert text == "This is step 2/3 of three"
    assert on_one_line("a b c", 3) == "a b"


def test_wrong_input_is_a_value_error() -> None:
    assert issubclass(errors.DataError, ValueError)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://AKIA:ab/cd+e=@bucket/x: no such file", "s3://***@bucket/x: no such file"),
        ("at https://me:pw@host:80/x, 'hdfs://host:90/a@b'", "at https://***@host:80/x, 'hdfs://host:90/a@b'"),
        ("s3://bucket/run:7 is a@b", "s3://bucket/run:7 is a@b"),
    ],
)  # fmt: skip
def test_messages_have_no_secrets_of_urls(text: str, shown: str) -> None:
    assert str(InvalidInputError(text)) == shown
    assert one_line(text) == shown
