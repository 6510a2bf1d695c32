"""This package makes the report of a directory of results: pages and their plots. It measures nothing."""
