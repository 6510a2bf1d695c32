"""From options to a ready executor: the target, the speculator, shapes, programs, strict mode's refusals."""
