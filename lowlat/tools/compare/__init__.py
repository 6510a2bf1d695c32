"""Comparison, stage by stage, of what lowlat computes with another implementation."""
