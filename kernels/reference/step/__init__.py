"""References of a step's bookkeeping: commands, slots, acceptance, commit, publication."""
