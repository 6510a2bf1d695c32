"""Small models to try lowlat with, and held-out prompts for them."""
