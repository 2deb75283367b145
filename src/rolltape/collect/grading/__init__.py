"""What an attempt comes to: whose fault a failure was, its grade, and grading it again from the tape."""
