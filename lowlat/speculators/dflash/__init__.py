"""DFlash's draft models fill a block of masks in one pass, over keys and values of the target's features.

It shares the reading of draft models with `lowlat.speculators.eagle3`.
"""
