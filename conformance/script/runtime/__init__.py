"""The code of standalone scripts: ordinary modules; a script contains parts of them."""
