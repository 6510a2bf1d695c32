"""This package has memory of an executor that can leave the device and come back: weights, KV, scratch."""
