"""Requests to Spark, and the differences between its deployments."""
