"""The families of targets, one file each: config.json to geometry, and checkpoint tensors to canonical weights."""
