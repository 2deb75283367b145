"""Grading: whose fault a failure was, the score of an attempt or a group, and grading again from the tape."""
