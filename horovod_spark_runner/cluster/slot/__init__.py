"""The inside of one Spark barrier task."""
