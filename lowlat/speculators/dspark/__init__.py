"""DSpark: DFlash's block with the last known token's row drafting, too, a bias by each drafted token, and confidences.

It builds on `lowlat.speculators.dflash`, and knows no kernels and no runtime.
"""
