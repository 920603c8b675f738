"""DataFrame to Parquet and manifest, on the driver."""
