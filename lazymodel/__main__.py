"""`python -m lazymodel`: the command line, if its script is not on the path."""

from lazymodel.extras.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
