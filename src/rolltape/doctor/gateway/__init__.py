"""The checks of gateways, from the side of the agent."""
