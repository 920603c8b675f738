"""Where the pip-installed Spark is.

``spark-submit`` is told, as ``SPARK_HOME``: the script it looks for it with cannot cope with an
interpreter in a folder with a blank in its name.
"""

from __future__ import annotations

from pathlib import Path

import pyspark

SPARK_HOME = Path(pyspark.__file__).parent
