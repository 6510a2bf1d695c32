"""Programs that answered one question each; what they found stands in notes and in results."""
