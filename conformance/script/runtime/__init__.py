"""What standalone scripts consist of: ordinary modules, of which a script has parts."""
