"""Recordings for `lowlat compare --against FILE`, saved by other engines through the hooks that they document.

A module for each engine, run where that engine is installed: `python -m bench.peers.tensors.vllm MODEL
--token-ids 1,2,3 --out FILE`. lowlat need not be able to run the model there.
"""
