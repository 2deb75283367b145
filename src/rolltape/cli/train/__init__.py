"""Commands about training data: samples, ledger, export, tokens."""
