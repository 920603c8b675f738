"""What this package asks of Spark, and what differs between its kinds."""
