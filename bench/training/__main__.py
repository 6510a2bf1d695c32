"""Train a draft model for a target that has none: see README.md."""

from bench.training.draft_model import main

if __name__ == "__main__":
    main()
