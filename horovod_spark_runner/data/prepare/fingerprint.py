"""Fingerprint of a DataFrame, without computing its rows.

Only plans that read files or versioned tables and use Spark's own deterministic expressions have
one. For others (rows from memory, user functions, the current time) the contents are compared
instead, see `horovod_spark_runner.data.prepare.materialize`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...cluster.spark.session import classic_context, with_settings
from ...errors import InvalidInputError
from ...storage.filesystem import Location

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject
    from pyspark.sql import DataFrame

# Plan nodes whose result is a function of their input, in any order.
_NODES = {
    *("Project", "Filter", "Join", "Aggregate", "Union", "SubqueryAlias", "View", "Distinct"),
    *("Sort", "Repartition", "RepartitionByExpression", "Window", "Generate", "Expand"),
    *("LogicalRelation", "DataSourceV2Relation"),
}
# Expressions that look deterministic to Spark, but depend on code or on the time.
_OPAQUE = re.compile(
    r"UDT?F|UserDefined|Aggregator|Invoke|Current|Now|LocalTimestamp|UnixTimestamp|Batch|InputFile"
)
# File indexes all of whose rows count. Tables such as Delta Lake's are read by the same plan, but
# can lose rows while their files are unchanged: their version counts.
_SPARK_INDEX = "org.apache.spark.sql.execution."
_DELTA_INDEX = "org.apache.spark.sql.delta.files.TahoeLogFileIndex"
# Parts of plans, as JSON and as text: names of sessions, and the choice of a version, which counts.
_TRANSIENT = re.compile(r'"jvmId":"[^"]*"|,"timeTravelSpec":null')
_TIME_TRAVEL = re.compile(r"(?m)(?<=\S) (VERSION|TIMESTAMP) AS OF \S+$")
# Session settings that change the rows of the same plan and files.
_SETTINGS = (
    "spark.sql.session.timeZone",
    "spark.sql.ansi.enabled",
    "spark.sql.caseSensitive",
    "spark.sql.legacy.timeParserPolicy",
    "spark.sql.files.ignoreCorruptFiles",
    "spark.sql.files.ignoreMissingFiles",
)

# Converting a plan to text changes a session setting: one plan at a time.
_lock = threading.Lock()


def source_fingerprint(frame: DataFrame) -> str:
    """Return the identity of ``frame``'s plan and of the files and tables it reads, or ``""``.

    It changes with the plan, with the path, size and time of change of every input file, with the
    version of every table, and with the session's settings that affect expressions. ``""`` means
    that the plan does not determine the contents.
    """
    if classic_context(frame.sparkSession) is None:
        return ""  # Spark Connect shows no plan
    execution = getattr(frame, "_jdf").queryExecution()  # noqa: B009 (as Petastorm does)
    plan = execution.analyzed()
    text = _plan_text(frame, plan)
    if not plan.deterministic() or not _is_reproducible(text):
        return ""
    # Leaves and input files do not include those of subqueries.
    if not plan.subqueriesAll().isEmpty():
        return ""
    # Cached rows may be of earlier files.
    relations = _relations(execution.withCachedData())
    if relations is None:
        return ""
    # The version of a table determines its files, which may be many.
    versioned = all(table for table, _ in relations)
    files = [] if versioned else _file_facts(frame.inputFiles())
    if files is None:
        return ""
    settings = [frame.sparkSession.conf.get(name, None) for name in _SETTINGS]
    read = [(table and [table.identity, table.version], facts) for table, facts in relations]
    return _digest([text, read, files, settings])


def is_computed_anew(frame: DataFrame) -> bool:
    """Return whether every pass computes the rows anew: nothing of the plan is cached by Spark.

    Also false where that is unknown, as on Spark Connect.
    """
    if classic_context(frame.sparkSession) is None:
        return False
    execution = getattr(frame, "_jdf").queryExecution()  # noqa: B009 (as Petastorm does)
    leaves = _leaves(execution.withCachedData())
    names = {leaf.getClass().getSimpleName() for leaf in leaves}
    return not names & {"InMemoryRelation", "LocalRelation"}


def _is_reproducible(plan: str) -> bool:
    """Return whether a plan, as JSON, always computes the same from the same files. Pure."""
    names = {name.rpartition(".")[2] for name in re.findall(r'"class":"([^"]+)"', plan)}
    nodes = {
        name.rpartition(".")[2]
        for name in re.findall(r'"class":"([^"]+)"', plan)
        if ".plans.logical." in name or ".execution." in name
    }
    return nodes <= _NODES and not any(_OPAQUE.search(name) for name in names)


def _plan_text(frame: DataFrame, plan: JavaObject) -> str:
    """Return the plan without the parts that differ between sessions.

    Spark's JSON lacks some fields, its text lacks types: both are used.
    """
    canonical = plan.canonicalized()
    longest = {"spark.sql.debug.maxToStringFields": str(2**31 - 1)}
    with _lock, with_settings(frame.sparkSession, longest):
        text = canonical.toString()
    return _TRANSIENT.sub("", str(canonical.toJSON())) + _TIME_TRAVEL.sub("", str(text))


@dataclass(frozen=True)
class _Table:
    """A table with versions, as a plan reads it.

    Attributes:
        name: its name or path.
        identity: what another table of that name has otherwise.
        version: its version.
    """

    name: str
    identity: str
    version: str


def table_versions(frame: DataFrame) -> dict[str, str]:
    """Return the versions of the tables that ``frame`` reads now, by name or path, if known."""
    if classic_context(frame.sparkSession) is None:
        return {}
    # A new frame: the plan of one that was computed has the versions of that time.
    execution = getattr(frame.select("*"), "_jdf").queryExecution()  # noqa: B009
    tables = map(_table_of, _leaves(execution.withCachedData()))
    return {table.name: table.version for table in tables if table is not None}


def _leaves(plan: JavaObject) -> list[JavaObject]:
    leaves = plan.collectLeaves()
    return [leaves.apply(number) for number in range(leaves.size())]


def _table_of(leaf: JavaObject) -> _Table | None:
    """Return the table that a leaf of a plan reads; ``None`` if it has no versions."""
    from py4j.protocol import Py4JError

    kind = leaf.getClass().getSimpleName()
    with contextlib.suppress(Py4JError):  # what Spark 4.0 and other releases of Delta Lake lack
        if kind == "DataSourceV2Relation":
            table = leaf.table()
            if table.version() and table.id():
                return _Table(table.name(), table.id(), table.version())
        elif kind == "LogicalRelation":
            index = leaf.relation().location()
            if index.getClass().getName() == _DELTA_INDEX:
                snapshot = index.getSnapshotToScan()  # the one that is read
                identity = f"{snapshot.metadata().id()} {index.partitionFilters()}"
                return _Table(str(index.path()), identity, str(snapshot.version()))
    return None


def _relations(plan: JavaObject) -> list[tuple[_Table | None, list[str]]] | None:
    """Return the tables that a plan reads, ``None`` for files, and how each is read.

    Returns:
        ``None`` if files and versions of tables do not determine the plan's rows.
    """
    relations: list[tuple[_Table | None, list[str]]] = []
    for leaf in _leaves(plan):
        table, kind = _table_of(leaf), leaf.getClass().getSimpleName()
        if kind == "DataSourceV2Relation" and table is not None:
            options = leaf.options().asCaseSensitiveMap().items()
            read = [f"{name}={value}" for name, value in options]
            relations.append((table, [leaf.schema().json(), *_other_options(read)]))
            continue
        if kind != "LogicalRelation":
            return None
        relation = leaf.relation()
        if table is None and not _is_of_files(relation):
            return None
        facts = [
            relation.fileFormat().getClass().getName(),
            relation.schema().json(),
            *_other_options(_scala_map(relation.options())),
        ]
        relations.append((table, facts))
    return relations


def _is_of_files(relation: JavaObject) -> bool:
    """Return whether a relation reads all rows of files that Spark lists."""
    if relation.getClass().getSimpleName() != "HadoopFsRelation":
        return False
    return bool(relation.location().getClass().getName().startswith(_SPARK_INDEX))


def _other_options(options: list[str]) -> list[str]:
    """Return the options of a read but those that choose a version of a table, sorted."""
    chosen = ("versionasof=", "timestampasof=")
    return sorted(option for option in options if not option.lower().startswith(chosen))


def _scala_map(values: JavaObject) -> list[str]:
    iterator = values.iterator()
    pairs = []
    while iterator.hasNext():
        pair = iterator.next()
        pairs.append(f"{pair._1()}={pair._2()}")
    return pairs


def _file_facts(urls: list[str]) -> list[list[object]] | None:
    """Return path, size and time of files; ``None`` if any is unknown."""
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


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
