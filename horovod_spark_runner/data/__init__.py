"""What a materialized dataset is, and where it lies."""
