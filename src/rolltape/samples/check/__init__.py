"""A trainer's token records against the tape: record by record, by step, and what the trainer never saw."""
