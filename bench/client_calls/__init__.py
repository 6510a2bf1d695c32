"""Other people's clients against a served chat model: one module a client, run by the Python that has the client."""
