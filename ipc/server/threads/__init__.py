"""This package has the threads of a server, how they wake one another, and what watches them."""
