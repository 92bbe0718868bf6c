"""The compiler's passes, one file each: every pass takes a program and returns a program."""
