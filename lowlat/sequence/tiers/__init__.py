"""The prefix cache has two tiers below the device's memory: host memory, and files."""
