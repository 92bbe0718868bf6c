"""`python -m stpart_compiler`: the command line."""

from stpart_compiler.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
