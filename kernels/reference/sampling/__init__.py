"""References of the choice of tokens, and the random numbers it draws."""
