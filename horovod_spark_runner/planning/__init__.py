"""Before a training: what more ranks would bring, measured in a minute and computed from it."""
