"""Our server with an encoder that reads every prompt, or none, for `bench screen --encoder`; for `python -m`.

`always`, `never` or `shipped`, as the product has it, comes first, then the product's command line.
Everything is as there, but for how sure the n-grams must be to decide alone. Not a setting: it is shipped
with the classifier. A prompt that a glance does not read whole goes to the encoder in all three.
"""

from __future__ import annotations

import math
import sys
from functools import partial

from app.api import server
from app.cli.main import main
from app.runtime import Runtime
from app.safety.classifiers.bundled_models import Models, load

SURE_BELOW = {"always": 0.0, "never": math.inf, "shipped": None}


def load_models(reads: str) -> Models:
    """The shipped classifiers, the n-grams being as sure as that."""
    models, sure_below = load(), SURE_BELOW[reads]
    return models if sure_below is None else models._replace(sure_below=sure_below)


if __name__ == "__main__":
    loading = partial(load_models, sys.argv.pop(1))
    # A function in the place of the class: the server only calls it.
    server.Runtime = partial(Runtime, load_models=loading)  # type: ignore[attr-defined,assignment]
    sys.exit(main())
