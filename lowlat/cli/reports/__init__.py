"""The reports of commands, as JSON values: sizes, geometry, comparisons. Nothing here prints."""
