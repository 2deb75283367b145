"""The checks of engines, and of an engine together with the folder of its model."""
