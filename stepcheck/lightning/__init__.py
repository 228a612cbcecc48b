"""What stepcheck adds to PyTorch Lightning."""
