"""Take the pipeline of ``flights_pipeline.py`` out of Spark, and score flights in another process.

The pipeline that ``flights_pipeline.py`` saved (run that first) is loaded and exported: Spark's
preparation and the network in one ONNX file. ``score_flights_onnx.py`` scores flights with it, in a
process that can find neither pyspark nor Java; its predictions are compared with Spark's.

Run it with ``python examples/export_flights.py --pipeline late_flights``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from flights import load_flights, make_session
from flights_pipeline import CATEGORIES, NUMBERS
from pyspark.ml import PipelineModel

from horovod_spark_runner import export_pipeline

# Neither pyspark nor what brings it can be imported there.
WITHOUT_SPARK = "import sys; sys.modules['pyspark'] = None; import runpy; sys.argv.pop(0); "
SCORE = WITHOUT_SPARK + "runpy.run_path(sys.argv[0], run_name='__main__')"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Score flights without Spark.")
    parser.add_argument("--pipeline", default="late_flights", help="saved one (late_flights)")
    parser.add_argument("--file", default="late_flights.onnx", help="where to export it to")
    parser.add_argument("--rows", type=int, default=1000, help="flights to score (1000)")
    return parser.parse_args()


def score_elsewhere(file: str, flights: list[dict[str, object]]) -> list[float]:
    """Return the predictions that a process without Spark and Java makes."""
    script = str(Path(__file__).with_name("score_flights_onnx.py"))
    known = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    done = subprocess.run(
        [sys.executable, "-c", SCORE, script, file],
        input="\n".join(map(json.dumps, flights)),
        # onnxruntime's builds report to their makers otherwise.
        env={**known, "PATH": "", "ORT_DISABLE_TELEMETRY": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [float(line) for line in done.stdout.splitlines()]


def main() -> None:
    arguments = parse_arguments()
    spark = make_session("local[2]")
    flights = load_flights(spark, arguments.rows).select(*NUMBERS, *CATEGORIES)
    pipeline = PipelineModel.load(str(Path(arguments.pipeline).absolute()))
    export_pipeline(pipeline, arguments.file, flights, mode="overwrite")
    print(f"Exported to {arguments.file}")

    predicted = pipeline.transform(flights).collect()
    rows = [{name: row[name] for name in [*NUMBERS, *CATEGORIES]} for row in predicted]
    spark.stop()
    delays = score_elsewhere(arguments.file, rows)
    pairs = zip(delays, predicted, strict=True)
    apart = max(abs(delay - row["prediction"]) for delay, row in pairs)
    print(f"{len(delays):,} flights scored by onnxruntime; at most {apart:.6f} minutes apart")


if __name__ == "__main__":
    main()
