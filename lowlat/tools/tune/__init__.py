"""Tuning: the launches of a pair whose plan depends on the GPU, the sweep of plans, and the table of the results.

`pairs` has the programs of a pair, `shapes` collects launches by lowering them, `arguments` gives launches memory,
`sweep` compiles and times plans within a budget, `estimates` says what fits into it, `results` makes a table of it, as
`lowlat.kernels.tuning` reads it.
"""
