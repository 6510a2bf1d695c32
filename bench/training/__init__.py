"""Training of draft models, and of the bundled targets: see README.md. It needs the extra `bench`."""
