"""This package tunes kernels: it finds the launches whose plan depends on the GPU, sweeps plans, and writes the table.

`pairs` builds the programs of a pair, `shapes` lowers them and collects launches, `arguments` gives launches memory,
`sweep` compiles and times plans within a budget, `estimates` predicts what fits into it, and `results` writes the table
that `lowlat.kernels.tuning` reads.
"""
