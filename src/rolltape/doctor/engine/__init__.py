"""The checks of engines, and of an engine with the folder of its model."""
