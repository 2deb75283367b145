"""Scripts that run in processes of their own, outside or inside a sandbox. Each is started by the path of its file."""
