"""Score flights with an exported pipeline: without Spark and Java; see ``export_flights.py``.

``python examples/score_flights.py BUNDLE < flights.json`` reads a flight as JSON from each line and
prints how late it will be, in minutes.
"""

from __future__ import annotations

import json
import sys

from horovod_spark_runner.scoring import load_pipeline


def main() -> None:
    scorer = load_pipeline(sys.argv[1])
    flights = [json.loads(line) for line in sys.stdin]
    columns = {name: [flight[name] for flight in flights] for name in scorer.input_types}
    for delay in scorer.score(columns)["prediction"].tolist():
        print(delay)


if __name__ == "__main__":
    main()
