"""The shipped model learns while another process collects ahead of it: see README.md."""
