"""The checks of gateways, from the agent's side."""
