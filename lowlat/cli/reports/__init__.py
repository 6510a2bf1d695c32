"""This package makes the reports of commands, as JSON values: sizes, geometry, comparisons. Nothing here prints."""
