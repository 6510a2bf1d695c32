"""Long contexts: texts that fill them, to train on and to measure with, and a target's loss by the place in them."""
