"""Files in local and shared storage."""
