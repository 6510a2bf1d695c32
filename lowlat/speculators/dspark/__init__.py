"""DSpark: DFlash's block, whose first row (the last known token's) drafts, too, and a bias by each drafted token.

It builds on `lowlat.speculators.dflash`.
"""
