"""DFlash's draft models fill a block of masks in one pass; their keys and values come from the target's features.

Reading draft models is shared with `lowlat.speculators.eagle3`.
"""
