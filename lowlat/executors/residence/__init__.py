"""This package gives an executor memory that can leave the device and come back: weights, KV, scratch."""
