"""A materialized dataset and its place."""
