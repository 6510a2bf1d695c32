"""Numbers that ranks leave in each other's memory: words that say for themselves that they are there, and rows that are
added up of them.
"""
