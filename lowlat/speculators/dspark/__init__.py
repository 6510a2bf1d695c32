"""DSpark adds to DFlash's block a draft by its first row, and a bias by each drafted token.

It builds on `lowlat.speculators.dflash`.
"""
