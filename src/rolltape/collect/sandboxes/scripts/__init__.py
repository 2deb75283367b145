"""Scripts that run in their own processes, outside or inside a sandbox. Each is started by the path of its file."""
