"""The memory of a runtime: what it will allocate, what it holds, and when SpecPV's lists are chosen again."""
