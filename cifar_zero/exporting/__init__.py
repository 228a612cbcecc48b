"""Writes trained models as plain files, and classifies images with them."""
