"""Score flights with an exported pipeline that is one ONNX file; see ``export_flights.py``.

It needs NumPy and onnxruntime only. ``python examples/score_flights_onnx.py FILE < flights.json``
reads a flight as JSON from each line and prints how late it will be, in minutes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import onnxruntime

DTYPES: dict[str, Any] = {
    "tensor(string)": object,
    "tensor(double)": np.float64,
    "tensor(float)": np.float32,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int16)": np.int16,
    "tensor(int8)": np.int8,
}


def main() -> None:
    session = onnxruntime.InferenceSession(sys.argv[1])
    flights = [json.loads(line) for line in sys.stdin]
    given = {}
    for column in session.get_inputs():
        values = [flight[column.name] for flight in flights]
        blank = "" if column.type == "tensor(string)" else 0
        filled = [blank if value is None else value for value in values]
        given[column.name] = np.array(filled, DTYPES[column.type])
        given[f"{column.name}.null"] = np.array([value is None for value in values])
    delays, states = session.run(["prediction", "row_state"], given)
    if states.any():
        raise SystemExit(f"flight {int(np.flatnonzero(states)[0])} cannot be scored")
    for delay in delays.tolist():
        print(delay)


if __name__ == "__main__":
    main()
