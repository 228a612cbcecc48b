"""What a reader of a run is shown: figures, tables and metrics.json. Plain values in; nothing here knows Lightning."""
