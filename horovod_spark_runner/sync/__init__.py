"""Ways of synchronising: what makes the ranks of a training train one model."""
