"""This package has speculation trees: choices read from files, topology with paths and masks, plans, dynamic trees."""
