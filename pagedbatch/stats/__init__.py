"""The account of memory. Reads plain snapshots; knows no torch and no scheduler."""
