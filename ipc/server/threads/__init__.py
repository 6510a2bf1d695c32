"""The threads of a server, how they wake one another, and what watches them. They know no message's content."""
