"""This package has requests: what each asks for and has got, checks of what may be asked, and growing prompts."""
