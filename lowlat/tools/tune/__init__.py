"""This package tunes: it finds launches whose plan depends on the GPU, sweeps plans, and writes the table.

`pairs` has the programs of a pair, `shapes` collects launches by lowering them, `arguments` gives launches memory,
`sweep` compiles and times plans within a budget, `estimates` says what fits into it, `results` makes a table of it, as
`lowlat.kernels.tuning` reads it.
"""
