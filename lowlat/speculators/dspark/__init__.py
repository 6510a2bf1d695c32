"""DSpark: DFlash's block with the last known token's row drafting, too, and a bias by each drafted token.

It builds on `lowlat.speculators.dflash`, and knows no kernels and no runtime.
"""
