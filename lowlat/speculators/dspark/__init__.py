"""DSpark extends DFlash's block: the first row drafts, too, and each drafted token biases the logits of the next.

It builds on `lowlat.speculators.dflash`.
"""
