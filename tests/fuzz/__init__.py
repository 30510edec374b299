"""Fuzz: bytes and objects that nobody meant, into everything here that reads what others wrote."""
