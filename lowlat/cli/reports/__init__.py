"""What commands report, as JSON values: sizes, geometry, comparisons. Nothing here prints."""
