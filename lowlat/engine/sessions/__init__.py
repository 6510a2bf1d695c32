"""Sessions: conversations whose prefixes stay while they live, and outlive the process in files."""
