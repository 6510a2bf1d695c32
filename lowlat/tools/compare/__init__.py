"""Comparison, stage by stage, of lowlat's values with another implementation's."""
