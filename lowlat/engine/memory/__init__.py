"""The memory of a runtime: its plan, the parts that are held, and the refreshes of SpecPV's lists."""
