"""The import-linter contract behind "only app/engine/sglang/ imports SGLang".

import-linter's own contracts take whole module names; this one takes patterns, so that a new module is
checked without being listed.
"""

from fnmatch import fnmatchcase
from typing import Any

from importlinter import Contract, ContractCheck, fields, output


class OnlyFromContract(Contract):
    """External `packages` are imported, at any depth, by modules matching `importers` only."""

    # import-linter replaces these descriptions by the configured values, which Any stands for.
    packages: Any = fields.ListField(subfield=fields.StringField())
    importers: Any = fields.ListField(subfield=fields.StringField())

    def check(self, graph: Any, verbose: bool) -> ContractCheck:  # noqa: ARG002, FBT001  import-linter's signature
        offenders = {
            (importer, package)
            for package in self.packages
            if package in graph.modules
            for importer in graph.find_modules_that_directly_import(package)
            if not any(fnmatchcase(importer, pattern) for pattern in self.importers)
        }
        return ContractCheck(kept=not offenders, metadata={"offenders": sorted(offenders)})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, package in check.metadata["offenders"]:
            output.print_error(f"{importer} imports {package}: only {', '.join(self.importers)} may")
