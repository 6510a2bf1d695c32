"""This package has requests: their parameters and tokens so far, the checks of new requests, and growing prompts."""
