"""The report of a directory of results: pages and their plots. It reads result files alone and measures nothing."""
