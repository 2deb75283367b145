"""The check of an agent: it runs on a model that follows a script."""
