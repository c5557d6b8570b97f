"""Ordinary mistakes, acted out, and the page with what mfwrap says to them."""
