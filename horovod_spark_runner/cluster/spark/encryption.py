"""Refuse unencrypted MPI traffic where Spark encrypts its own, unless the user allows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...config.launch import LaunchOptions
from ...errors import EnvironmentProblem
from .session import runs_on_this_machine

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Spark's settings that encrypt what it sends over the network.
SETTINGS = (
    "spark.ssl.enabled",
    "spark.ssl.rpc.enabled",
    "spark.network.crypto.enabled",
    "spark.authenticate.enableSaslEncryption",
)


def check_encryption(spark: SparkSession, options: LaunchOptions) -> None:
    """Refuse to send in the clear what Spark is set to encrypt, unless that is allowed.

    Raises:
        EnvironmentProblem: Spark encrypts its traffic, and ranks may be on several hosts.
    """
    if options.allow_unencrypted or runs_on_this_machine(spark):
        return
    on = [name for name in SETTINGS if str(spark.conf.get(name, "false")).lower() == "true"]
    if on:
        raise EnvironmentProblem(
            f"Spark is set to encrypt its traffic ({', '.join(on)}), but gradients and weights "
            "between ranks (MPI) and log lines, large arguments and large results between ranks "
            "and driver are sent unencrypted; use a network that is trusted or encrypts by itself "
            "(WireGuard, IPsec), and say so with allow_unencrypted=True"
        )
