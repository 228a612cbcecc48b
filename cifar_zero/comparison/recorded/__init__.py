"""Short trainings recorded step by step, tensor by tensor, and judged against a reference."""
