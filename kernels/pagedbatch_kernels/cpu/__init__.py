"""The native CPU backend: C++ built on the user's machine, on first use. Importing it builds nothing."""
