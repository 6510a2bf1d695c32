"""This package reads target models, by family, and emits them as operations of a Program."""
