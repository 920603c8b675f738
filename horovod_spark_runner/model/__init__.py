"""The trained model as Spark knows it."""
