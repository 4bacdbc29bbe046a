"""Everything that replaces or wraps SGLang's own functions, written against SGLang 0.5.20.

Each module names what it replaces in `REPLACED`, with a digest of SGLang's source. When SGLang changes one of
these functions, tests/contract/test_sglang_patches.py fails. The functions that are only called are listed in
tests/contract/test_sglang_private_api.py.
"""
