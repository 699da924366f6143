"""The documents keep their word: what is generated is up to date, what is linked is there, what is to be typed works."""
