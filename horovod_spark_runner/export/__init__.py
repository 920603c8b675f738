"""Fitted pipelines of Spark ML, written to be scored without Spark."""
