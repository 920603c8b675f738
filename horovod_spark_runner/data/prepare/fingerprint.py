"""Fingerprint of a DataFrame, made without computing its rows.

That can be told only of a plan that reads files and computes from them by Spark's own
deterministic expressions. Of any other (rows from memory, user functions, the current time) it
cannot, and its contents are compared instead (see `horovod_spark_runner.data.prepare.materialize`).
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from typing import TYPE_CHECKING, Any

from ...cluster.spark.session import classic_context
from ...errors import InvalidInputError
from ...storage.filesystem import Location

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Plan nodes whose result is a function of what they read, in whatever order it comes.
_NODES = {
    *("Project", "Filter", "Join", "Aggregate", "Union", "SubqueryAlias", "View", "Distinct"),
    *("Sort", "Repartition", "RepartitionByExpression", "Window", "Generate", "Expand"),
    "LogicalRelation",
}
# Expressions that look deterministic to Spark, but depend on code or on when they are computed.
_OPAQUE = re.compile(
    r"UDT?F|UserDefined|Aggregator|Invoke|Current|Now|LocalTimestamp|UnixTimestamp|Batch|InputFile"
)
# What lists files of which all rows count. Tables of Delta Lake and the like are read by the same
# plan, and rows of theirs can go while the files stay as they were.
_SPARK_INDEX = "org.apache.spark.sql.execution."
# Settings of the session by which the same plan gives other rows of the same files.
_SETTINGS = (
    "spark.sql.session.timeZone",
    "spark.sql.ansi.enabled",
    "spark.sql.caseSensitive",
    "spark.sql.legacy.timeParserPolicy",
    "spark.sql.files.ignoreCorruptFiles",
    "spark.sql.files.ignoreMissingFiles",
)

# A setting of the session is changed while a plan becomes text: one plan at a time.
_lock = threading.Lock()


def source_fingerprint(frame: DataFrame) -> str:
    """Return the identity of ``frame``'s plan and of the files it reads, or ``""``.

    It changes with the plan, with the path, size and time of change of every input file, and with
    the session's settings that matter to expressions. ``""`` says that the contents cannot be
    told from the plan.
    """
    if classic_context(frame.sparkSession) is None:
        return ""  # Spark Connect shows no plan
    execution = getattr(frame, "_jdf").queryExecution()  # noqa: B009 (as Petastorm does)
    plan = execution.analyzed()
    text = _plan_text(frame, plan)
    if not plan.deterministic() or not is_reproducible(text):
        return ""
    # Neither leaves nor input files are those of plans within expressions.
    if not plan.subqueriesAll().isEmpty():
        return ""
    # What is cached was read at another time than the files now are of.
    relations = _relations(execution.withCachedData())
    files = _file_facts(frame.inputFiles())
    if relations is None or files is None:
        return ""
    settings = [frame.sparkSession.conf.get(name, None) for name in _SETTINGS]
    return _digest([text, relations, files, settings])


def is_reproducible(plan: str) -> bool:
    """Tell whether a plan, as JSON, computes the same from the same files every time. Pure."""
    names = {name.rpartition(".")[2] for name in re.findall(r'"class":"([^"]+)"', plan)}
    nodes = {
        name.rpartition(".")[2]
        for name in re.findall(r'"class":"([^"]+)"', plan)
        if ".plans.logical." in name or ".execution." in name
    }
    return nodes <= _NODES and not any(_OPAQUE.search(name) for name in names)


def _plan_text(frame: DataFrame, plan: Any) -> str:
    """Return the plan without what differs from one session to the next.

    Spark's JSON leaves some fields out, its text shows them but no types: both count.
    """
    canonical = plan.canonicalized()
    session = frame.sparkSession
    name = "spark.sql.debug.maxToStringFields"
    with _lock:
        before = session.conf.get(name, None)
        session.conf.set(name, str(2**31 - 1))
        try:
            text = canonical.toString()
        finally:
            if before is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, before)
    return re.sub(r'"jvmId":"[^"]*"', "", str(canonical.toJSON())) + str(text)


def _relations(plan: Any) -> list[list[str]] | None:
    """Return how the plan's files are read; ``None`` if they do not tell its rows."""
    relations = []
    leaves = plan.collectLeaves()
    for number in range(leaves.size()):
        leaf = leaves.apply(number)
        if leaf.getClass().getSimpleName() != "LogicalRelation":
            return None
        relation = leaf.relation()
        if relation.getClass().getSimpleName() != "HadoopFsRelation":
            return None
        if not relation.location().getClass().getName().startswith(_SPARK_INDEX):
            return None
        relations.append(
            [
                relation.fileFormat().getClass().getName(),
                relation.schema().json(),
                *sorted(_scala_map(relation.options())),
            ]
        )
    return relations


def _scala_map(values: Any) -> list[str]:
    iterator = values.iterator()
    pairs = []
    while iterator.hasNext():
        pair = iterator.next()
        pairs.append(f"{pair._1()}={pair._2()}")
    return pairs


def _file_facts(urls: list[str]) -> list[list[Any]] | None:
    """Return path, size and time of files; ``None`` if not all of that is known."""
    facts = []
    for url in sorted(urls):
        try:
            stat = Location(url).stat()
        except (InvalidInputError, OSError):
            return None
        if stat is None or not stat.changed:
            return None
        facts.append([url, stat.size, stat.changed])
    return facts


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
