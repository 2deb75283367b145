"""`python -m rolltape.cli`, if the command itself is not on the path."""

from rolltape.cli import main

if __name__ == "__main__":
    main()
