"""`python -m rolltape`, for environments where the command is not on the path."""

from rolltape.cli import main

if __name__ == "__main__":
    main()
