"""What runs inside one Spark barrier task."""
