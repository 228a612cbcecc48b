"""`stepcheck script`: compares the optimizer steps of an old training script with the steps of a LightningModule."""
