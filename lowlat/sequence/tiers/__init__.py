"""This package has the prefix cache's two tiers below the device's memory: host memory, and files."""
