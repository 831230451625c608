"""The account as one HTML page with figures."""
