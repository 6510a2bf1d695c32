"""This package has the commands, one module each; a module is imported when its command runs."""
