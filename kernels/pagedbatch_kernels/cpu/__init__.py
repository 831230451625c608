"""The native CPU backend: C++ that is built on the user's machine on first use, not on import."""
