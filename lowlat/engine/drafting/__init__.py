"""What chooses a step's bucket by what is drafted, forced or proposed, and what is learnt of draft lengths' costs."""
