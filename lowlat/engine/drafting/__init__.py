"""The choice of a step's bucket by what is drafted, forced or proposed, and the learning of draft lengths' costs."""
