"""`python -m app`. The guard matters: SGLang's children import this module again."""

import sys

from app.cli import main

if __name__ == "__main__":
    sys.exit(main())
