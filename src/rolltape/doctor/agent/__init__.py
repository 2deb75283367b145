"""The check of an agent: it runs with a model that follows a script."""
