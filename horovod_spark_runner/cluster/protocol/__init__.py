"""What the processes of a launch have in common: values they exchange, and the ways they take."""
