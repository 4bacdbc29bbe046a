"""Functions of SGLang 0.5.20 that its scheduler runs in our form.

Each module replaces a few of them by `install`, in the scheduler's process alone, and names them in
`REPLACED` with a digest of their source. tests/contract/test_sglang_patches.py fails when one changes.
"""
