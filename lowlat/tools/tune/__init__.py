"""Tuning: the launches of a pair whose plan depends on the card, the sweep of plans, and the table of the results.

`pairs` has the programs of a pair, `shapes` collects launches by lowering them, `arguments` gives launches memory,
`sweep` compiles and times plans within a budget, `results` makes a table of it. It knows no kernel: what a plan may be
is said by the launch itself, see `lowlat.kernels.tuning`.
"""
