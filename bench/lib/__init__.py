"""This package has what all programs of bench/ share: one model, one step builder, one count of bytes, one clock."""
