"""Grading: find the cause of a failure, score an attempt or a group, and grade again from the tape."""
