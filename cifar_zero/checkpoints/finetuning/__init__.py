"""Starting from weights that are there, training some of them or adapters beside them, and keeping only those."""
