"""This package makes a ready executor from options: target, speculator, shapes, programs, strict mode's refusals."""
