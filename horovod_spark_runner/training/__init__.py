"""What a rank does with a training, and how the driver asks for it."""
