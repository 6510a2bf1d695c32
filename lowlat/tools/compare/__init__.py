"""This package compares lowlat's values with another implementation's, stage by stage."""
