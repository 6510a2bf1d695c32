"""Other engines next to lowlat: the same geometry, context, batch and depth, in the same run, on the same GPU.

    python -m bench.peers --geometry llama-8b --context 8192 --batch 1 -S 0,3 --out peers.json

Each engine is a module with an `Engine` of its own, run in a process of its own; nothing of theirs is in this
repository, and one that is not installed is named in the result with the reason.
"""
